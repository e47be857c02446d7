"""Each mistake is found where it was made, and nothing is found in clean data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forerun.data.inspect.corpus_report import (
    CorpusReport,
    ExaminedDocuments,
    ExaminedRows,
    Lengths,
    SkippedRows,
    SourceSummary,
)
from forerun.data.inspect.findings import findings, share_text

SEEN = ExaminedDocuments(documents=100, tokens=4950)
ROWS = ExaminedRows(40, 5120, 102, 2000, 0)
LONG = Lengths(np.concatenate([np.full(62, 60), np.full(38, 200)]), 100)


def seen(**found: Any) -> dict[str, Any]:
    return {"documents_examined": replace(SEEN, **found)}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "no token has a loss": ("wrong", {"rows_examined": replace(ROWS, learned=0, unlearned_rows=40)}),
    "100 of 100 conversations have no token with a loss": ("wrong", seen(unlearned=100)),
    "3 of 100 conversations have no token with a loss": ("check", seen(unlearned=3)),
    "12 % of the rows have no token with a loss": ("check", {"rows_examined": replace(ROWS, unlearned_rows=5)}),
    "only 1.0 % of the tokens have a loss": ("check", {"rows_examined": replace(ROWS, learned=50)}),
    "41 % of every batch is padding": ("wrong", {"padding_share": 0.41}),
    "15 % of every batch is padding": ("check", {"padding_share": 0.15}),
    "38 % of the documents are longer than the sequence of 128": ("check", {"lengths": LONG}),
    "every document begins with two <s>": ("wrong", seen(doubled_start=100, start="<s>")),
    "7 documents end without an end token": ("check", seen(endless=7)),
    "12 of 100 examined documents repeat an earlier one": ("check", seen(repeated=12, most_often=(9, "hello"))),
    "the text contains <|im_end|> as plain text": ("check", seen(spelled_out=4, spelled="<|im_end|>")),
    "2.0 % of the tokens are unknown to the tokenizer": ("check", seen(unknown_tokens=99)),
    "40 rows do not fill one batch of 64": ("wrong", {"batch": 64}),
    "the job sees every row about 200 times": ("check", {"steps": 1000}),
    "2 bad rows were skipped (2.0 %)": (
        "check",
        {"skipped": 2, "skipped_first": [SkippedRows("a.jsonl, line 7", "empty text")]},
    ),
    "chat: an epoch has every document 12.5 times": (
        "check",
        {"sources": [SourceSummary("chat", "1 file", 1, 9, 100, 4950, share=0.5, passes=12.5)]},
    ),
}


def test_clean_data_is_left_in_peace(clean: CorpusReport) -> None:
    assert findings(clean) == []


@pytest.mark.parametrize("what", CASES)
def test_each_mistake_is_found_alone(what: str, clean: CorpusReport) -> None:
    level, spoiled = CASES[what]
    found = findings(replace(clean, **spoiled))
    assert [(one.level, one.what) for one in found] == [(level, what)]
    assert all(one.why and one.fix for one in found)


@pytest.mark.parametrize(
    ("packing", "policy", "level"),
    [
        ("whole", "split", "check"),
        ("whole", "keep_start", "wrong"),
        ("whole", "drop", "wrong"),
        ("concatenate", "", "note"),
    ],
)
def test_what_becomes_of_long_documents_decides_how_bad_it_is(
    packing: str, policy: str, level: str, clean: CorpusReport
) -> None:
    (found,) = findings(replace(clean, lengths=LONG, packing=packing, too_long_policy=policy))
    assert found.level == level
    assert "sequence=256 holds 99" in found.fix


def test_the_shorter_sequence_for_padding_holds_the_documents(clean: CorpusReport) -> None:
    look = replace(clean, sequence=2048, padding_share=0.4, lengths=Lengths(np.full(100, 1100), 100))
    (found,) = findings(look)
    assert "sequence=1152" in found.fix


def test_the_worst_comes_first(clean: CorpusReport) -> None:
    found = findings(replace(clean, padding_share=0.5, skipped=1, **seen(endless=5)))
    assert [one.level for one in found] == ["wrong", "check", "note"]


def test_shares_are_never_rounded_to_nothing_or_all() -> None:
    given = (0, 0.0001, 0.003, 0.0996, 0.41, 0.995, 0.99999, 1)
    assert [share_text(share) for share in given] == [
        *("0 %", "< 0.1 %", "0.3 %", "10.0 %", "41 %", "99.5 %", "> 99.9 %", "100 %")
    ]
