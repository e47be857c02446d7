"""Ctrl-C and worse in the middle of a plan: nothing runs on, nothing is left on the disk."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.aot

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "bench" / "jobs" / "qwen3-0.6b.yaml"
PATIENCE_SECONDS = 60


@contextmanager
def planning(temp: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A plan of two slices that is lowering both, and the processes of its compilers."""
    temp.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temp)}
    command = [sys.executable, "-m", "forerun.cli.main", "plan", str(JOB), "--on", "v5e-8,v5p-8", "--no-cache"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes) as parent:  # type: ignore[call-overload]
        assert parent.stderr is not None
        assert {parent.stderr.readline(), parent.stderr.readline()} == {"v5e-8: lowering\n", "v5p-8: lowering\n"}
        children = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if str(temp) in command_of(pid)]
        assert len(children) == 2
        yield parent, [os.pidfd_open(pid) for pid in children]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def assert_ended(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_SECONDS)[0], "a compiler runs on"
        os.close(pidfd)


@pytest.mark.skipif(os.cpu_count() == 1, reason="one compiler at a time on one core")
def test_ctrl_c(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    with planning(temp) as (parent, compilers):
        parent.send_signal(signal.SIGINT)
        out, err = parent.communicate(timeout=PATIENCE_SECONDS)
        assert_ended(compilers)
    assert parent.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "stopped by Ctrl-C"
    assert "Traceback" not in err
    assert list(temp.iterdir()) == []


@pytest.mark.skipif(os.cpu_count() == 1, reason="one compiler at a time on one core")
def test_parent_killed(tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    with planning(temp) as (parent, compilers):
        parent.kill()
        parent.wait(timeout=PATIENCE_SECONDS)
        assert_ended(compilers)
    assert list(temp.iterdir()) == []
