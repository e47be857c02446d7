"""Preference pairs to tokens: every form of row, and that only the answers count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.data.source.columns import Columns
from forerun.data.source.rows import BadRow, RowError, RowPlace, SourceRow
from forerun.data.source.values import checker
from forerun.data.tokens.document import Encoder
from forerun.data.tokens.recipe import Recipe
from forerun.hub.chat.template import CHATML

END = 256


def encoded(*rows: dict[str, Any], template: str | None = CHATML) -> list[Any]:
    recipe = Recipe("bytes", "bytes", END, 257, template)
    check = checker(Columns("chosen/rejected", {}))
    checked = [SourceRow(check(row, ""), RowPlace("f", n)) for n, row in enumerate(rows, 1)]
    return Encoder(recipe, "chosen/rejected").encode(checked)


def texts(document: tuple[Any, Any]) -> tuple[str, str]:
    """What does not count, and what does; ~ is the end."""
    ids, learned = document
    learned = np.ones(len(ids), np.bool_) if learned is None else learned
    both = (ids[~learned], ids[learned])
    return tuple(bytes(one[one < END].tolist()).decode() + "~" * int((one == END).sum()) for one in both)  # type: ignore[return-value]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "texts": (
        {"prompt": "Two plus two?", "chosen": " Four", "rejected": " Fish"},
        [("Two plus two?", " Four~"), ("Two plus two?", " Fish~")],
    ),
    "the common beginning, up to its last space": (
        {"chosen": "H: Two?\n\nA: It is four", "rejected": "H: Two?\n\nA: It is fish"},
        [("H: Two?\n\nA: It is", " four~"), ("H: Two?\n\nA: It is", " fish~")],
    ),
    "nothing in common": ({"chosen": "yes", "rejected": "no"}, [("", "yes~"), ("", "no~")]),
    "an answer that is empty": (
        {"prompt": "Say nothing.", "chosen": "", "rejected": "What?"},
        [("Say nothing.", "~"), ("Say nothing.", "What?~")],
    ),
    "conversations": (
        {
            "chosen": [said("user", "Hi"), said("assistant", "Hello!")],
            "rejected": [said("user", "Hi"), said("assistant", "Go away")],
        },
        [(ASKED + "\n", "Hello!<|im_end|>~"), (ASKED + "\n", "Go away<|im_end|>~")],
    ),
    "a prompt of messages": (
        {"prompt": [said("user", "Hi")], "chosen": [said("assistant", "A")], "rejected": [said("assistant", "B")]},
        [(ASKED + "\n", "A<|im_end|>~"), (ASKED + "\n", "B<|im_end|>~")],
    ),
    "a prompt of messages, answers as texts": (
        {"prompt": [said("user", "Hi")], "chosen": "A", "rejected": "B"},
        [(ASKED + "\n", "A<|im_end|>~"), (ASKED + "\n", "B<|im_end|>~")],
    ),
    "a prompt that the conversations repeat": (
        {
            "prompt": "Hi",
            "chosen": [said("user", "Hi"), said("assistant", "A")],
            "rejected": [said("user", "Hi"), said("assistant", "B")],
        },
        [(ASKED + "\n", "A<|im_end|>~"), (ASKED + "\n", "B<|im_end|>~")],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_only_the_answers_count(form: str) -> None:
    row, wanted = FORMS[form]
    (found,) = encoded(row)
    assert [texts(side) for side in found.documents] == wanted


def test_an_answer_that_both_share_is_no_answer() -> None:
    before = [said("user", "Hi"), said("assistant", "Hello"), said("user", "One?")]
    (found,) = encoded({"chosen": [*before, said("assistant", "1")], "rejected": [*before, said("assistant", "2")]})
    assert [texts(side)[1] for side in found.documents] == ["1<|im_end|>~", "2<|im_end|>~"]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "chosen": "same", "rejected": "same"}, "the same"),
        ({"chosen": "text", "rejected": [{"role": "assistant", "content": "x"}]}, "different types"),
        ({"chosen": [said("assistant", "A")], "rejected": [said("assistant", "A")]}, "the same"),
    ],
)
def test_bad_pairs_are_bad_rows(row: dict[str, Any], what: str) -> None:
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    first, bad, last = encoded(good, row, good)
    assert isinstance(bad, BadRow)
    assert what in bad.what
    assert texts(first.documents[1]) == texts(last.documents[1]) == ("q", "b~")


def test_a_prompt_needs_no_answer_but_a_side_does() -> None:
    check = checker(Columns("chosen/rejected", {}))
    with pytest.raises(RowError, match="no text of the assistant"):
        check({"chosen": [said("user", "Hi")], "rejected": [said("assistant", "B")]}, "")
