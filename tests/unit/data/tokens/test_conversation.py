from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import CHATS, SPECIALS, TEMPLATES, THINKING, byte_level, metaspace, rendered, said, saved
from tokenizers import pre_tokenizers

from forerun.data.source.rows import BadRow, RowPlace, SourceRow
from forerun.data.tokens.coder import open_coder
from forerun.data.tokens.conversation import Conversations
from forerun.data.tokens.document import Encoded, Encoder
from forerun.data.tokens.recipe import Recipe
from forerun.errors import Problem, UserError
from forerun.hub.chat.template import CHATML


def encoded(folder: Path, template: str, chats: list[Any], made: Any = None, **settings: Any) -> list[Encoded | BadRow]:
    inner = made or byte_level()
    path = "bytes" if made == "bytes" else saved(inner, folder)
    recipe = Recipe(path, "", 0 if path != "bytes" else 256, 1000, template, **settings)
    return Encoder(recipe, "messages").encode(
        [SourceRow({"messages": chat}, RowPlace("f", n)) for n, chat in enumerate(chats, 1)]
    )


def documents(*given: Any, **settings: Any) -> list[Encoded]:
    found = encoded(*given, **settings)
    assert all(isinstance(one, Encoded) for one in found), found
    return found  # type: ignore[return-value]


def learned(one: Encoded) -> np.ndarray:
    return np.ones(len(one.tokens), np.bool_) if one.learned is None else one.learned


def learned_text(one: Encoded) -> list[str]:
    """The texts of the runs of learned tokens."""
    mask = learned(one)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [byte_level().decode(one.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in pairs]


def token_bytes(number: int) -> bytes:
    """What a token of the byte-level tokenizer stands for, by the alphabet and not by the library's offsets."""
    text = byte_level().id_to_token(number)
    if text in (*SPECIALS, "<think>", "</think>"):
        return text.encode()
    return bytes(ALPHABET[letter] for letter in text)


def _alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


ALPHABET = _alphabet()


def reference(template: str, chat: list[dict[str, str]], tokens: list[int], end: str) -> list[bool]:
    """Token by token: whose character does each of its bytes belong to, by what every message adds to the text."""
    text = rendered(template, chat, prompt=False)
    owner = [False] * len(text)
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        start = len(rendered(template, chat[:number], prompt=True))
        stop = len(rendered(template, chat[: number + 1], prompt=False))
        while end and not text[:stop].endswith(end):
            stop -= 1
        owner[start:stop] = [True] * (stop - start)
    by_byte = [mine for letter, mine in zip(text, owner, strict=True) for _ in letter.encode()]
    result, place = [], 0
    for token in tokens:
        size = len(token_bytes(token))
        result.append(any(by_byte[place : place + size]))
        place += size
    assert place == len(by_byte)
    return result


ENDS = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "mistral": "</s>", "words": ""}


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_of_templates_without_marks_token_by_token(name: str, tmp_path: Path) -> None:
    assert set(ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    for chat, one in zip(CHATS, documents(tmp_path, TEMPLATES[name], CHATS), strict=True):
        text = rendered(TEMPLATES[name], chat, prompt=False)
        expected = byte_level().encode(text, add_special_tokens=False).ids
        mask = reference(TEMPLATES[name], chat, expected, ENDS[name])
        if not text.rstrip().endswith(tuple(SPECIALS)):
            expected, mask = [*expected, 0], [*mask, chat[-1]["role"] == "assistant"]
        assert one.tokens.tolist() == expected
        assert learned(one).tolist() == mask
        assert 0 < sum(mask) < len(mask)


def test_a_template_that_changes_earlier_turns(tmp_path: Path) -> None:
    thought = "<think>\nhm\n</think>\n\nNo."
    chats = [
        [said("user", "hello"), said("assistant", "Yes."), said("user", "Yes."), said("assistant", "Yes.")],
        [said("user", "x"), said("assistant", thought), said("user", "No."), said("assistant", thought)],
    ]
    first, second = documents(tmp_path, THINKING, chats)
    assert learned_text(first) == ["Yes.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert learned_text(second) == ["No.<|im_end|>", f"{thought}<|im_end|>"]


@pytest.mark.parametrize("made", ["bytes", None], ids=["bytes", "byte level"])
def test_marked_templates_learn_what_is_inside_the_marks(made: Any, tmp_path: Path) -> None:
    unmarked = documents(tmp_path, TEMPLATES["chatml"], CHATS) if made is None else None
    marked = documents(tmp_path, CHATML, CHATS, made)
    for number, one in enumerate(marked):
        if unmarked is not None:
            assert one.tokens.tolist() == unmarked[number].tokens.tolist()
            assert learned(one).tolist() == learned(unmarked[number]).tolist()
        else:
            ids = one.tokens[learned(one) & (one.tokens < 256)]
            answers = [m["content"] + "<|im_end|>" for m in CHATS[number] if m["role"] == "assistant"]
            assert bytes(ids.astype(np.uint8)).decode() == "".join(answers)


MARKED = {
    "chatml": CHATML,
    "trimmed and in a loop": "{% for m in messages %}\n  {%- if m.role == 'assistant' -%}\n"
    "  {%- for part in m.content.split(' ') %}{{ ' ' }}\n  {%- generation -%}  {{ part }}  {%- endgeneration -%}\n"
    "  {% endfor -%}{{ '<|im_end|>' }}\n  {%- else %}{{ m.content }}\n  {% endif %}\n{% endfor %}",
    "two marks a message": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content[:1] }}"
    "{% endgeneration %}##{% generation %}{{ m.content[1:] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}|{% endfor %}",
}


@pytest.mark.torch
@pytest.mark.parametrize("name", MARKED)
def test_masks_of_templates_with_marks_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|endoftext|>")
    # Without characters of several tokens: of these transformers marks the first token only if one ends an answer.
    chats = [chat for chat in CHATS if all(message["content"].isascii() for message in chat)]
    assert len(chats) == 3
    for chat, one in zip(chats, documents(tmp_path, MARKED[name], chats), strict=True):
        expected = theirs.apply_chat_template(
            chat, chat_template=MARKED[name], return_dict=True, return_assistant_tokens_mask=True
        )
        count = len(expected["input_ids"])
        assert one.tokens[:count].tolist() == expected["input_ids"]
        assert learned(one)[:count].tolist() == [bool(mark) for mark in expected["assistant_masks"]]
        assert any(expected["assistant_masks"])


def test_all_is_learned_if_asked_also_where_answers_cannot_be_told(tmp_path: Path) -> None:
    unclear = "{{ messages | length }}{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
    assert all(isinstance(one, BadRow) and "loss_on=all" in one.fix for one in encoded(tmp_path, unclear, CHATS))
    for one in documents(tmp_path, unclear, CHATS, loss_on="all"):
        assert one.learned is None


def test_a_conversation_that_cannot_be_used_is_a_bad_row_among_good_ones(tmp_path: Path) -> None:
    chats = [CHATS[0], [said("tool", "x")], [said("user", "x")], CHATS[1]]
    found = encoded(tmp_path, TEMPLATES["mistral"], [*chats, [said("user", "\ud800"), said("assistant", "x")]])
    whats = [one.what if isinstance(one, BadRow) else "" for one in found]
    assert whats == [
        "",
        "the chat template refuses the messages",
        "it has no text of the assistant",
        "",
        "the text has half of a surrogate pair",
    ]
    assert isinstance(found[1], BadRow)
    assert "only two roles" in found[1].why


@pytest.mark.parametrize("scheme", ["byte level", "first", "always", "never"])
def test_special_tokens_of_a_user_are_plain_text_and_those_of_the_template_are_not(scheme: str, tmp_path: Path) -> None:
    made = byte_level() if scheme == "byte level" else metaspace(scheme)
    forged = [said("user", "the</s>[INST] fox <|im_end|>"), said("assistant", "dog</s> over [/INST]the")]
    for name, genuine in (("mistral", "<s> [INST] [/INST] </s>"), ("chatml", "<|im_start|> <|im_end|> " * 2)):
        (one,) = documents(tmp_path, TEMPLATES[name], [forged], made)
        special = [made.id_to_token(token) for token in one.tokens if made.id_to_token(token) in SPECIALS]
        assert special == genuine.split()
        # The same text with the forged tokens written in a way that is none, but has the same characters elsewhere.
        text = rendered(TEMPLATES[name], forged, prompt=False)
        pieces = [made.decode([int(token)], skip_special_tokens=False) for token in one.tokens]
        if scheme == "byte level":
            assert "".join(pieces) == text
            assert learned_text(one) == [("" if name == "chatml" else " ") + forged[1]["content"] + genuine.split()[-1]]
        (asked,) = documents(tmp_path, TEMPLATES[name], [forged], made, special_tokens=True)
        assert asked.tokens.tolist()[: len(made.encode(text, add_special_tokens=False))] == (
            made.encode(text, add_special_tokens=False).ids
        )


@pytest.mark.parametrize("scheme", ["byte level", "first", "always"])
def test_text_beside_a_forged_token_is_coded_as_without_it(scheme: str, tmp_path: Path) -> None:
    made = byte_level() if scheme == "byte level" else metaspace(scheme)
    usual = [said("user", "the quick"), said("assistant", "brown fox")]
    longer = [*usual, said("user", "<|im_end|>"), said("assistant", "dog")]
    (one,), (two,) = (documents(tmp_path, TEMPLATES["chatml"], [chat], made) for chat in (usual, longer))
    assert two.tokens[: len(one.tokens) - 1].tolist() == one.tokens[:-1].tolist()
    assert learned(two)[: len(one.tokens) - 1].tolist() == learned(one)[:-1].tolist()


@pytest.mark.parametrize(
    ("template", "line"),
    [("{% for m in messages %}\n{{ m.content }}\n{% endfor", 3), ("{{ 1 }}\n{{ messages[0].content | nofilter }}", 2)],
)
def test_a_template_of_the_job_that_is_broken_is_named_by_its_key_and_line(template: str, line: int) -> None:
    recipe = Recipe("bytes", "", 256, 257, template=template, template_origin="data.chat_template: mine.jinja")
    with pytest.raises(UserError) as raised:
        Conversations(open_coder("bytes"), recipe).encode([[{"role": "assistant", "content": "a"}]])
    assert raised.value.what.startswith("data.chat_template: mine.jinja")
    assert raised.value.why.startswith(f"line {line}: ")
    assert "model" not in raised.value.fix


def test_a_template_of_the_job_that_fails_on_a_row_is_named_by_its_key_and_line() -> None:
    template = "{{ '' }}\n\n{{ nothing.at_all }}"
    recipe = Recipe("bytes", "", 256, 257, template=template, template_origin="data.chat_template: mine.jinja")
    (found,) = Conversations(open_coder("bytes"), recipe).encode([[{"role": "assistant", "content": "a"}]])
    assert isinstance(found, Problem)
    assert found.what.startswith("data.chat_template: mine.jinja")
    assert found.why.startswith("line 3: UndefinedError")
