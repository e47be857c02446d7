from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import UserError
from forerun.track import skips as skips_module
from forerun.track.skips import SkipFile


def test_what_was_left_out_is_known_again(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    assert SkipFile(file).known == {}
    SkipFile(file).add(8, "loss nan, gradient norm nan")
    SkipFile(file).add(12, "a spike")
    assert SkipFile(file).known == {8: "loss nan, gradient norm nan", 12: "a spike"}


def test_it_is_on_the_disk_before_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's bytes, and then its name in the folder."""
    flushed: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> Any:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.startswith(str(tmp_path)):  # and not what another thread of this process may be writing
            flushed.append((name, os.fstat(descriptor).st_size))
        return real(descriptor)

    monkeypatch.setattr(skips_module.os, "fsync", fsync)
    file = tmp_path / "skips.jsonl"
    SkipFile(file).add(8, "why")
    assert flushed[0] == (str(file), file.stat().st_size)
    assert flushed[1][0] == str(tmp_path)


def test_a_line_torn_by_a_kill_is_not_there_and_not_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    SkipFile(file).add(8, "why")
    file.write_bytes(file.read_bytes() + b'{"step": 9, "wh')
    assert SkipFile(file).known == {8: "why"}
    SkipFile(file).add(10, "why not")
    assert SkipFile(file).known == {8: "why", 10: "why not"}


def test_what_was_not_the_batchs_fault_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    skips = SkipFile(file)
    for step in (3, 8, 9):
        skips.add(step, "why")
    skips.forget([8, 9, 10])
    assert skips.known == SkipFile(file).known == {3: "why"}
    assert list(tmp_path.iterdir()) == [file]


def test_a_line_that_says_nothing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "skips.jsonl"
    file.write_text('{"step": 3, "why": "x"}\n{"step": "many"}\n')
    with pytest.raises(UserError, match="line 2"):
        SkipFile(file)
