"""Every format of rows against TRL's own rendering of the same rows: token ids and the tokens with loss.

TRL renders the text and divides it into prompt and completion. transformers marks the tokens of the assistant. Tokens
of the assistant in the completion have a loss, as with `assistant_only_loss` and `completion_only_loss` of TRL.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import byte_level, said, saved

from forerun.config.schema import Data
from forerun.data.corpus import Dialect, recipe_of
from forerun.data.source.rows import SourceRow
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens.document import Encoded, Encoder
from forerun.hub.chat.template import CHATML

pytestmark = pytest.mark.torch
# As ChatML, also for contents that are lists of parts.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{% set said = [m.content] %}"
    "{% else %}{% set said = m.content | map(attribute='text') | list %}{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{% for part in said %}{{ part }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{% for part in said %}{{ part }}{% endfor %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Row = dict[str, Any]
Document = tuple[list[int], list[bool]]
ASKED, ANSWERED = "the quick brown fox?", "over the lazy dog"


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl.data_utils", reason="trl is not installed: scripts/torch")


def tokenizer(template: str = CHATML) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|endoftext|>")
    made.chat_template = template
    return made


def theirs(trl: Any, row: Row, side: str = "completion", template: str = CHATML) -> Document:
    """Return the ids and the tokens with loss of one side of a row with messages."""
    made, row = tokenizer(template), copy.deepcopy(row)
    rendered = trl.apply_chat_template(row, made)
    prompt = rendered.get("prompt", "")
    text = prompt + rendered[side] if side in rendered else rendered["text"]
    messages = row["prompt"] + row[side] if side in row else row["messages"]
    coded = made.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = made(text, add_special_tokens=False)["input_ids"]
    assert coded["input_ids"] == ids
    begin = len(made(prompt, add_special_tokens=False)["input_ids"])
    return ids, [bool(mark) and at >= begin for at, mark in enumerate(coded["assistant_masks"])]


def ours(folder: Path, row: Row, template: str = CHATML, *, pairs: bool = False, **settings: Any) -> list[Document]:
    """Return the ids and the tokens with loss as a job would train on them: one document, or both sides of a pair."""
    (folder / "rows.jsonl").write_text(json.dumps(row))
    data = Data(path=str(folder / "rows.jsonl"), **settings)
    source = open_source(data)
    dialect = Dialect(load_tokenizer(saved(byte_level(), folder)), template)
    rows = [one for piece in source.pieces(1 << 30) for one in source.rows(piece)]
    assert all(isinstance(one, SourceRow) for one in rows), rows
    (found,) = Encoder(recipe_of(source, data, dialect, pairs=pairs), source.form).encode(rows)  # type: ignore[arg-type]
    assert isinstance(found, Encoded), found
    return [
        (ids.tolist(), (np.ones(len(ids), np.bool_) if learned is None else learned).tolist())
        for ids, learned in found.documents
    ]


CONVERSATION = [said("user", ASKED), said("assistant", "Yes."), said("user", "and?"), said("assistant", ANSWERED)]
SYSTEM = "say Yes. and No."
CASES: dict[str, tuple[Row, Row, dict[str, Any]]] = {  # our row, TRL's row, our settings
    "messages": ({"messages": CONVERSATION}, {"messages": CONVERSATION}, {}),
    "messages from columns": (
        {"q": ASKED, "r": "hm\n", "a": ANSWERED},
        {"messages": [said("user", f"Q: {ASKED}"), said("assistant", f"{{hm\n}}{ANSWERED}")]},
        {
            "columns": {
                "messages": [
                    {"role": "user", "content": "Q: {q}"},
                    {"role": "assistant", "content": "{{{r}}}{a}"},
                ]
            }
        },
    ),
    "a system prompt of the job": (
        {"messages": CONVERSATION},
        {"messages": [said("system", SYSTEM), *CONVERSATION]},
        {"system": SYSTEM},
    ),
    "a system prompt of the row": (
        {"messages": [said("system", "the row"), *CONVERSATION]},
        {"messages": [said("system", "the row"), *CONVERSATION]},
        {"system": SYSTEM},
    ),
    "prompt and completion, with the template by default": (
        {"prompt": ASKED, "completion": ANSWERED},
        {"prompt": [said("user", ASKED)], "completion": [said("assistant", ANSWERED)]},
        {},
    ),
    "a completion from columns and a system prompt": (
        {"prompt": ASKED, "r": "hm", "a": ANSWERED},
        {"prompt": [said("system", SYSTEM), said("user", ASKED)], "completion": [said("assistant", f"hm\n{ANSWERED}")]},
        {"columns": {"completion": "{r}\n{a}"}, "system": SYSTEM},
    ),
    "prompt and completion as messages": (
        {"prompt": CONVERSATION[:1], "completion": [said("assistant", ANSWERED)]},
        {"prompt": CONVERSATION[:1], "completion": [said("assistant", ANSWERED)]},
        {},
    ),
    "a prompt with an answer, which has no loss": (
        {"prompt": CONVERSATION[:3], "completion": [CONVERSATION[3], *CONVERSATION]},
        {"prompt": CONVERSATION[:3], "completion": [CONVERSATION[3], *CONVERSATION]},
        {},
    ),
    "a prompt with an answer, and a system prompt of the job": (
        {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]},
        {"prompt": [said("system", SYSTEM), *CONVERSATION[:3]], "completion": CONVERSATION[3:]},
        {"system": SYSTEM},
    ),
    # The line end between instruction and input is that of axolotl, see test_exchange.py.
    "Alpaca with input": (
        {"instruction": ASKED, "input": "the dog", "output": ANSWERED},
        {"prompt": [said("user", f"{ASKED}\nthe dog")], "completion": [said("assistant", ANSWERED)]},
        {},
    ),
    "Alpaca without input": (
        {"instruction": ASKED, "input": "", "output": ANSWERED},
        {"prompt": [said("user", ASKED)], "completion": [said("assistant", ANSWERED)]},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_conversations_are_those_of_trl(case: str, trl: Any, tmp_path: Path) -> None:
    row, reference, settings = CASES[case]
    expected = theirs(trl, reference)
    assert 0 < sum(expected[1]) < len(expected[1])
    assert ours(tmp_path, row, **settings) == [expected]


def test_sharegpt_is_converted_as_by_trl(trl: Any, tmp_path: Path) -> None:
    def row(user: str, assistant: str) -> Row:
        names = {"user": user, "assistant": assistant}
        return {"conversations": [{"from": names[one["role"]], "value": one["content"]} for one in CONVERSATION]}

    expected = theirs(trl, trl.maybe_convert_to_chatml(row("user", "assistant")))
    assert ours(tmp_path, row("user", "assistant")) == [expected]
    assert ours(tmp_path, row("human", "gpt")) == [expected]  # TRL keeps these names, which no template knows


def test_text_parts_are_joined_as_by_a_template_that_knows_parts(trl: Any, tmp_path: Path) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    row = {
        "messages": [
            {"role": "user", "content": parts("the quick ", "brown fox?")},
            {"role": "assistant", "content": parts("over", " the lazy", " dog")},
        ]
    }
    assert ours(tmp_path, row, PARTS) == [theirs(trl, row, template=PARTS)]
    assert ours(tmp_path, row) == [theirs(trl, {"messages": [said("user", ASKED), said("assistant", ANSWERED)]})]


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_pairs_of_messages_are_those_of_trl(form: str, trl: Any, tmp_path: Path) -> None:
    row = {
        "chosen": [*CONVERSATION[:3], said("assistant", ANSWERED)],
        "rejected": [*CONVERSATION[:3], said("assistant", "No. dog")],
    }
    extracted = trl.extract_prompt(copy.deepcopy(row))
    assert extracted["prompt"] == CONVERSATION[:3]
    expected = [theirs(trl, extracted, side) for side in ("chosen", "rejected")]
    assert ours(tmp_path, row if form == "implicit" else extracted, pairs=True) == expected


def test_texts_from_columns_and_plain_prompts_are_those_of_trl(tmp_path: Path) -> None:
    """TRL adds the end token to a text, and joins plain prompts and completions."""
    made = tokenizer()
    text = f"{ASKED}\n<think>the user</think>\n{ANSWERED}"
    row = {"question": ASKED, "reasoning": "the user", "answer": ANSWERED}
    columns = {"text": "{question}\n<think>{reasoning}</think>\n{answer}"}
    ids = made(text + made.eos_token)["input_ids"]
    assert ours(tmp_path, row, columns=columns) == [(ids, [True] * len(ids))]
    prompt = len(made(ASKED)["input_ids"])
    ids = made(f"{ASKED} {ANSWERED}" + made.eos_token)["input_ids"]
    plain = ours(tmp_path, {"prompt": ASKED, "completion": f" {ANSWERED}"}, apply_template=False)
    assert plain == [(ids, [at >= prompt for at in range(len(ids))])]
