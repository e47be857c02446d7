from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_assertions import raises_error
from recording_reporter import RecordingReporter

from forerun.data.order.ledger import Ledger, drawn, entries
from forerun.data.order.rows import Example

STEPS: list[list[Example]] = [[(0, 1), (0, 2, 3)], [(1, 7)], [], [(0, 4), (0, 5), (0, 6)]]


def written(file: Path, steps: list[list[Example]]) -> Path:
    with Ledger(file) as ledger:
        for step, examples in enumerate(steps):
            ledger.write(step, examples)
    return file


def test_a_line_a_step(tmp_path: Path) -> None:
    assert written(tmp_path / "new" / "ledger.jsonl", STEPS).read_text().splitlines()[:2] == [
        '{"step":0,"examples":[[0,1],[0,2,3]]}',
        '{"step":1,"examples":[[1,7]]}',
    ]


@pytest.mark.parametrize("cut", [0, 1, 12, 36])
def test_a_resumed_ledger_equals_one_that_was_never_stopped(tmp_path: Path, cut: int) -> None:
    """Killed in the middle of step 3's line, resumed from the checkpoint after step 0."""
    whole = written(tmp_path / "whole.jsonl", STEPS)
    broken = tmp_path / "broken.jsonl"
    content = whole.read_bytes()
    broken.write_bytes(content[: len(content) - cut])
    with Ledger(broken, step=1) as ledger:
        for step in (1, 2, 3):
            ledger.write(step, STEPS[step])
    assert broken.read_bytes() == content
    assert list(entries(broken)) == list(enumerate(STEPS))


def test_resuming_at_the_end_keeps_every_line_but_the_half_one(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", STEPS)
    content = file.read_bytes()
    file.write_bytes(content + b'{"step":4,"exa')
    Ledger(file, step=4).close()
    assert file.read_bytes() == content


def test_a_half_written_end_counts_as_not_written(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", STEPS)
    file.write_bytes(file.read_bytes() + b'{"step":4,"examples":[[0,')
    assert list(entries(file)) == list(enumerate(STEPS))


def test_what_is_no_ledger_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("hello\n")
    with raises_error("E-DATA-014"):
        list(entries(file))


@pytest.mark.parametrize(
    "broken", [b"hello", b'{"step": 1}', b'{"step": 1, "examples": 7}', b'{"step": 1, "examples": [7]}']
)
def test_a_resumed_ledger_keeps_what_is_no_entry_aside(tmp_path: Path, broken: bytes) -> None:
    file, told = written(tmp_path / "a.jsonl", STEPS), list[str]()
    content = file.read_bytes()
    file.write_bytes(broken + b"\n" + content)
    Ledger(file, step=4, reporter=RecordingReporter(told)).close()
    assert file.read_bytes() == content
    assert len(told) == 1
    assert (tmp_path / "a.jsonl.damaged").read_bytes() == broken + b"\n"


def test_a_step_that_was_left_out_learned_from_nothing_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    with Ledger(file, 1) as ledger:
        ledger.write(1, [(0, 5)])
        ledger.write(2, [(0, 7), (0, 8, 1)], skipped="loss nan")
    said = json.loads(file.read_text().splitlines()[1])
    assert said == {"step": 2, "examples": [], "skipped": [[0, 7], [0, 8, 1]], "why": "loss nan"}
    assert list(entries(file)) == [(1, [(0, 5)]), (2, [])]


def test_what_was_drawn_is_known_of_steps_left_out_too(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    with Ledger(file) as ledger:
        ledger.write(1, [(0, 4), (0, 9, 2)])
        ledger.write(2, [(0, 17)], skipped="loss nan")
    assert list(drawn(file)) == [(1, [(0, 4), (0, 9, 2)], None), (2, [(0, 17)], "loss nan")]
