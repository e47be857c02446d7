"""Chat templates of model families: token ids and tokens with loss against TRL's training templates.

forerun uses the model's own template, which has no generation marks. TRL uses a training template with marks, whose
masks transformers computes. The intended differences, each a part of `Family`:

- White space after the end of a turn has no loss: the model stops before it.
- The generation prompt has no loss, because the model never writes it. TRL's marks include parts of some prompts.
- The text is that of the model's template. TRL's templates keep the thoughts of earlier turns, or add empty ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_assertions import assert_error
from small_tokenizers import saved
from trl_templates import CHATS, SPECIALS, Chat, byte_tokens, template

from forerun.data.source.rows import BadRow, RowPlace, SourceRow
from forerun.data.tokens.document import Encoded, Encoder
from forerun.data.tokens.recipe import Recipe
from forerun.hub.chat.template import SPOKEN_DATE

pytestmark = pytest.mark.torch
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
THOUGHT = r"<think>\n(?s:.*?)\n</think>\n\n"


@dataclass(frozen=True)
class Family:
    """A template, and the intended differences from TRL's training template.

    Args:
      prompt: the part of the generation prompt that TRL's marks include, as a regular expression.
      earlier: text at the start of answers before the last question that only TRL writes.
      inner: text at the start of other answers except the last one that only TRL writes.
      last: text at the end of the last answer that only TRL writes.
      lost: chats that the template cannot write completely, each with the code of the error.
      switch: variables of the template.
    """

    prompt: str = ""
    earlier: str = ""
    inner: str = ""
    last: str = ""
    lost: tuple[str, ...] = ()
    switch: tuple[tuple[str, bool], ...] = ()


TOOL_CHATS = tuple(name for name in CHATS if "tool" in name)
THOUGHT_CHATS = tuple(name for name in CHATS if "thoughts" in name)
ONLY_TEXT = (*TOOL_CHATS, *THOUGHT_CHATS)
FAMILIES: dict[str, Family] = {
    "cohere": Family(lost=ONLY_TEXT),
    "gemma": Family(lost=ONLY_TEXT),
    "gemma3": Family(lost=ONLY_TEXT),
    "phi3": Family(lost=ONLY_TEXT),
    "llama3": Family(lost=ONLY_TEXT),
    "lfm2": Family(lost=ONLY_TEXT),
    "lfm2_v2": Family(lost=THOUGHT_CHATS),
    "qwen2_5": Family(prompt=r"\n", lost=THOUGHT_CHATS),
    "qwen3_instruct_2507": Family(lost=THOUGHT_CHATS),
    "qwen3": Family(earlier=THOUGHT, inner=r"<think>\n\n</think>\n\n"),
    "qwen3_5_think": Family(prompt=r"<think>\n", earlier=THOUGHT),
    "qwen3_5_nothink": Family(prompt=r"<think>\n\n</think>\n\n", earlier=THOUGHT, lost=THOUGHT_CHATS),
    "qwen3_6": Family(prompt=r"<think>\n", earlier=THOUGHT),
    "qwen3_8": Family(prompt=r"<think>\n"),
    "glm4moe": Family(last=r"<\|user\|>"),
    "gptoss": Family(prompt=r"<\|start\|>assistant", lost=("a tool and a content",)),
    "nemotron_3_nano": Family(prompt=r"<think></think>|<think>\n"),
}


def theirs(name: str, chat: Chat) -> tuple[str, list[bool]]:
    """Return TRL's text, and whether each of its characters has a loss. All characters are ASCII."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=byte_tokens(), eos_token="</s>", bos_token="<s>")
    if name == "gptoss":  # TRL's template reads only this name
        chat = ([_renamed(message) for message in chat[0]], chat[1])
    coded = made.apply_chat_template(
        chat[0],
        tools=chat[1],
        chat_template=template(f"{name}_training"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    pieces = [made.decode([token]) for token in coded["input_ids"]]
    marks = zip(pieces, coded["assistant_masks"], strict=True)
    text = re.sub(r"date: \d{4}-\d\d-\d\d", f"date: {SPOKEN_DATE}", "".join(pieces))  # theirs is today
    return text, [bool(mark) for piece, mark in marks for _ in piece]


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    return {"thinking" if key == "reasoning_content" else key: value for key, value in message.items()}


def expected(family: Family, text: str, marks: list[bool], questions: list[int]) -> tuple[str, list[bool]]:
    """Return TRL's text and marks, changed by the intended differences.

    `questions` has the number of answers before the last question.
    """
    borders = np.flatnonzero(np.diff(np.array([False, *marks, False], np.int8)))
    runs = list(zip(borders[::2], borders[1::2], strict=True))
    parts: list[tuple[str, bool]] = []
    place = 0
    for number, (start, stop) in enumerate(runs):
        parts.append((text[place:start], False))
        said, place = text[start:stop], stop
        last = number == len(runs) - 1
        only_theirs = family.earlier if number < questions[0] else "" if last else family.inner
        said = re.sub(rf"\A(?:{only_theirs})", "", said)
        prompt = re.match(family.prompt, said)
        begin = prompt.end() if prompt and not (only_theirs and number < questions[0]) else 0
        if last and family.last:
            said = re.sub(rf"{family.last}\Z", "", said)
        end = len(said.rstrip()) if said.rstrip().endswith(tuple(SPECIALS)) else len(said)
        parts += [(said[:begin], False), (said[begin:end], True), (said[end:], False)]
    parts.append((text[place:], False))
    return "".join(part for part, _ in parts), [mark for part, mark in parts for _ in part]


def ours(name: str, family: Family, chats: list[Chat], folder: Path) -> list[Encoded | BadRow]:
    special = {**SPECIAL, **dict(family.switch)}
    recipe = Recipe(saved(byte_tokens(), folder), "", 256, 1000, template(name), special)
    rows = [
        SourceRow({"messages": messages, "tools": tools}, RowPlace("f", n)) for n, (messages, tools) in enumerate(chats)
    ]
    return Encoder(recipe, "messages").encode(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_masks_are_those_of_trl(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    for chat_name, found in zip(CHATS, ours(name, family, list(CHATS.values()), tmp_path), strict=True):
        if chat_name in family.lost:
            assert isinstance(found, BadRow), chat_name
            assert found.code in ("E-HUB-060", "E-HUB-061", "E-HUB-003"), found
            continue
        assert isinstance(found, Encoded), (chat_name, found)
        chat = CHATS[chat_name]
        roles = [message["role"] for message in chat[0]]
        last_question = len(roles) - 1 - roles[::-1].index("user")
        text, marks = expected(family, *theirs(name, chat), [roles[:last_question].count("assistant")])
        coded = byte_tokens().encode(text, add_special_tokens=False)
        tokens, learned = found.tokens, found.learned
        assert learned is not None
        count = len(coded.ids)
        assert byte_tokens().decode(tokens.tolist()[:count], skip_special_tokens=False) == text, chat_name
        assert tokens.tolist()[:count] == coded.ids
        assert learned.tolist()[:count] == [marks[start] for start, _ in coded.offsets], chat_name
        assert tokens.tolist()[count:] in ([], [256])  # the end of a document, if the template writes no end


def learned_texts(found: Encoded | BadRow) -> list[str]:
    assert isinstance(found, Encoded), found
    mask = found.learned if found.learned is not None else np.ones(len(found.tokens), np.bool_)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    runs = zip(borders[::2], borders[1::2], strict=True)
    return [byte_tokens().decode(found.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in runs]


GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>'
GEMMA4 = {
    "two turns": ["Hello.<turn|>", "Bye.<turn|>"],
    "thoughts": ["<|channel>thought\nGreet.\n<channel|>Hello.<turn|>"],
    "two turns with thoughts": ["Hello.<turn|>", "<|channel>thought\nLeave.\n<channel|>Bye.<turn|>"],
    "a tool": [GEMMA_CALL, "It is sunny.<turn|>"],
    "a tool with thoughts": [
        GEMMA_CALL,
        "It is sunny.<turn|>",
        "<|channel>thought\nPolite.\n<channel|>Welcome.<turn|>",
    ],
    # The template writes the result of the tool before the content, and the next answer continues the turn.
    "a tool and a content": [GEMMA_CALL, "Let me see.It is sunny.<turn|>"],
}


def test_gemma_4_learns_channels_and_calls_but_not_results(tmp_path: Path) -> None:
    """TRL has no training template for Gemma 4, so the expected texts are written out."""
    family = Family(switch=(("enable_thinking", True),))
    found = ours("gemma4_v5", family, [CHATS[name] for name in GEMMA4], tmp_path)
    assert dict(zip(GEMMA4, map(learned_texts, found), strict=True)) == GEMMA4


def test_gemma_4_without_thinking_rejects_thoughts(tmp_path: Path) -> None:
    for name, found in zip(CHATS, ours("gemma4_v5", Family(), list(CHATS.values()), tmp_path), strict=True):
        if name in THOUGHT_CHATS:
            assert isinstance(found, BadRow)
            assert_error(found.error(), "E-HUB-061", fix="data.thinking=true")
        else:
            assert isinstance(found, Encoded), found


@pytest.mark.parametrize("on", [True, False])
def test_qwen3_begins_after_the_prompt_of_its_switch(on: bool, tmp_path: Path) -> None:
    names = ("two turns", "a tool")
    found = ours("qwen3", Family(switch=(("enable_thinking", on),)), [CHATS[name] for name in names], tmp_path)
    block = "<think>\n\n</think>\n\n" if on else ""  # off: the generation prompt contains it
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert [learned_texts(one) for one in found] == [
        ["Hello.<|im_end|>", f"{block}Bye.<|im_end|>"],
        [called, f"{block}It is sunny.<|im_end|>"],
    ]


def test_lost_calls_of_lfm2_are_reported(tmp_path: Path) -> None:
    (found,) = ours("lfm2", Family(), [CHATS["a tool"]], tmp_path)
    assert isinstance(found, BadRow)
    assert_error(found.error(), "E-HUB-060", what="'tool_calls' of message 2", fix="data.ignored_fields=[tool_calls]")


@pytest.mark.parametrize("name", ["gptoss", "lfm2_2_5", "glm4moe"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_the_template_under_the_name_that_it_reads(name: str, field: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello.", field: "Greet."}]
    (found,) = ours(name, Family(), [(messages, None)], tmp_path)
    (said,) = learned_texts(found)
    assert "Greet." in said
    assert "Hello." in said


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gemma4_v5", "qwen3_5_think"])
def test_arguments_that_are_json_texts_are_objects_for_the_template(name: str, tmp_path: Path) -> None:
    messages, tools = CHATS["a tool"]
    call = messages[1]["tool_calls"][0]
    text = {**call, "function": {**call["function"], "arguments": '{"city":"Paris"}'}}
    as_text = [messages[0], {**messages[1], "tool_calls": [text]}, *messages[2:]]
    one, two = ours(name, Family(), [(messages, tools), (as_text, tools)], tmp_path)
    assert isinstance(one, Encoded)
    assert isinstance(two, Encoded)
    assert one.tokens.tolist() == two.tokens.tolist()
