"""The verdict on real lock files: held by a live process, left by a dead one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.hardware.tpu_lock import read_lock

HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.{how}(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


def holder(path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD.format(how=how), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_no_file(tmp_path: Path) -> None:
    assert read_lock(tmp_path / "lock") is None


def test_held_by_a_live_process_then_left_by_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for how in ("flock", "lockf"):
        with holder(path, how) as process:
            found = read_lock(path)
            assert found is not None
            assert [entry.pid for entry in found.holders] == [process.pid]
            assert "import fcntl" in found.holders[0].command
            process.kill()
        left = read_lock(path)
        assert left is not None
        assert (left.holders, left.mine) == ((), True)


def test_the_kernels_table_is_enough(tmp_path: Path) -> None:
    """A process whose open files may not be looked at is still found by its lock."""
    path = tmp_path / "lock"
    path.touch()
    status = path.stat()
    proc = tmp_path / "proc"
    for pid in (12, 13):
        (proc / str(pid)).mkdir(parents=True)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    (proc / "locks").write_text(
        f"1: FLOCK  ADVISORY  WRITE 12 {place}:{status.st_ino} 0 EOF\n"
        f"1: -> FLOCK  ADVISORY  WRITE 13 {place}:{status.st_ino} 0 EOF\n"
        f"2: POSIX  ADVISORY  WRITE 14 {place}:{status.st_ino} 0 EOF\n"
        f"3: POSIX  ADVISORY  WRITE 12 {place}:{status.st_ino + 1} 0 EOF\n"
    )
    found = read_lock(path, proc)
    assert found is not None
    assert [entry.pid for entry in found.holders] == [12, 13]


def test_a_process_that_ends_while_it_is_looked_at_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, proc = tmp_path / "lock", tmp_path / "proc"
    path.touch()
    for pid in (11, 12, 13):
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "fd" / "3").symlink_to(path)

    def ended(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def look(folder: Any) -> Any:
            if str(folder).endswith("12/fd"):
                raise FileNotFoundError(folder)
            return real(folder)

        return look

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, ended(getattr(os, name)))
    found = read_lock(path, proc)
    assert found is not None
    assert [entry.pid for entry in found.holders] == [11, 13]


def test_looking_does_not_take_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    read_lock(path)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
