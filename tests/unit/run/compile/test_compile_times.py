from __future__ import annotations

from pathlib import Path

import pytest

from forerun.run.compile import compile_times
from forerun.run.compile.compile_times import CompileTimes


def test_the_first_known_key_is_the_expectation(tmp_path: Path) -> None:
    times = CompileTimes(tmp_path / "sub" / "times.json")
    assert times.expected_seconds("program a", "job x") is None
    times.record(12.5, "program a", "job x")
    times.record(20.0, "program b", "job x")
    assert times.expected_seconds("program a", "job x") == 12.5
    assert times.expected_seconds("program c", "job x") == 20.0


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"job x": "soon"}', "\xff"])
def test_a_damaged_file_is_no_expectation_and_is_written_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(content, encoding="latin-1")
    assert CompileTimes(path).expected_seconds("job x") is None
    CompileTimes(path).record(3.0, "job x")
    assert CompileTimes(path).expected_seconds("job x") == 3.0


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CompileTimes(tmp_path / "file" / "times.json").record(3.0, "job x")
    assert CompileTimes(tmp_path / "file" / "times.json").expected_seconds("job x") is None


def test_old_entries_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_times, "MAX_ENTRIES", 2)
    times = CompileTimes(tmp_path / "times.json")
    for number in range(3):
        times.record(number + 1.0, f"job {number}")
    assert [times.expected_seconds(f"job {number}") for number in range(3)] == [None, 2.0, 3.0]
