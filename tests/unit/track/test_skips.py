from __future__ import annotations

import json
from pathlib import Path

import pytest
from recording_reporter import RecordingReporter

from forerun.track.skips import SkipFile


def opened(path: Path, **given: object) -> SkipFile:
    return SkipFile(path, **{"identity": "this run", "saved": {}, **given})  # type: ignore[arg-type]


def test_what_was_left_out_is_known_again(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    assert opened(file).known == {}
    assert not file.exists()
    opened(file).add(8, "loss nan, gradient norm nan")
    opened(file).add(12, "a spike")
    assert opened(file).known == {8: "loss nan, gradient norm nan", 12: "a spike"}


def test_a_line_torn_by_a_kill_is_not_there_and_not_in_the_way(tmp_path: Path) -> None:
    file, told = tmp_path / "skips.jsonl", list[str]()
    opened(file).add(8, "why")
    file.write_bytes(file.read_bytes() + b'{"step": 9, "wh')
    assert opened(file, reporter=RecordingReporter(told)).known == {8: "why"}
    opened(file).add(10, "why not")
    assert opened(file).known == {8: "why", 10: "why not"}
    assert told == []


def test_what_was_not_the_batchs_fault_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    skips = opened(file)
    for step in (3, 8, 9):
        skips.add(step, "why")
    skips.forget([8, 9, 10])
    assert skips.known == opened(file).known == {3: "why"}
    assert list(tmp_path.iterdir()) == [file]


def test_steps_up_to_the_checkpoint_come_from_it_and_later_ones_from_the_file(tmp_path: Path) -> None:
    file, told = tmp_path / "skips.jsonl", list[str]()
    skips = opened(file)
    for step in (2, 3, 8):
        skips.add(step, "why")
    again = opened(file, step=5, saved={3: "why", 4: "why"}, reporter=RecordingReporter(told))
    assert again.known == {3: "why", 4: "why", 8: "why"}
    [text] = told
    assert "4 are restored" in text
    assert "2 are removed" in text
    assert opened(file, step=5, saved={3: "why", 4: "why"}, reporter=RecordingReporter(told)).known == again.known
    assert len(told) == 1


FORGED = [
    {"step": 9, "why": "x"},
    {"step": 9, "why": "x", "proof": ""},
    {"step": 9, "why": "x", "proof": 7},
    {"step": 9, "why": 3},
    {"step": "many", "why": "x"},
    {},
]


@pytest.mark.parametrize("forged", FORGED, ids=json.dumps)
def test_a_line_that_this_run_did_not_write_is_removed(tmp_path: Path, forged: dict[str, object]) -> None:
    file, told = tmp_path / "skips.jsonl", list[str]()
    opened(file).add(8, "why")
    before = file.read_bytes()
    file.write_bytes(before + json.dumps(forged).encode() + b"\n")
    assert opened(file, reporter=RecordingReporter(told)).known == {8: "why"}
    assert file.read_bytes() == before
    assert len(told) == 1


def test_a_changed_line_and_one_of_another_run_are_removed(tmp_path: Path) -> None:
    file, other, told = tmp_path / "skips.jsonl", tmp_path / "other.jsonl", list[str]()
    opened(file).add(8, "why")
    opened(other, identity="another run").add(9, "why")
    file.write_bytes(file.read_bytes().replace(b"8", b"7", 1) + other.read_bytes())
    assert opened(file, reporter=RecordingReporter(told)).known == {}
    [text] = told
    assert "7, 9" in text
