"""Ctrl-C and worse in the middle of a plan: nothing runs on, nothing is left on the disk."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.aot

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "bench" / "jobs" / "qwen3-0.6b.yaml"
PATIENCE_SECONDS = 300

# A shell that starts this in the background has SIGINT ignored, also by us and by our children. A function run between
# fork and exec would fork this process, which has JAX's threads: newer versions of JAX warn of it.
HEED_CTRL_C = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@contextmanager
def planning(temp: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A plan of two slices that is lowering both, and the processes of its compilers."""
    temp.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temp)}
    arguments = ["-m", "forerun.cli.main", "plan", str(JOB), "--on", "v5e-8,v5p-8", "--no-cache"]
    command = [sys.executable, "-c", HEED_CTRL_C, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes) as parent:  # type: ignore[call-overload]
        assert parent.stderr is not None
        begun: set[str] = set()
        while begun != {"v5e-8", "v5p-8"}:  # on a busy machine one may be done before the other has begun
            line = parent.stderr.readline()
            assert line
            begun |= {line.partition(":")[0]} if line.endswith(": lowering\n") else set()
        children = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if str(temp) in command_of(pid)]
        assert 1 <= len(children) <= 2
        pidfds = []
        for pid in children:
            with suppress(ProcessLookupError):  # done since
                pidfds.append(os.pidfd_open(pid))
        yield parent, pidfds


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
    deadline = time.monotonic() + PATIENCE_SECONDS
    while list(temp.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a compiler that had only just begun still finds out
    assert list(temp.iterdir()) == []
