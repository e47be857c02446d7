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

pytestmark = [pytest.mark.aot, pytest.mark.timing]

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "bench" / "jobs" / "qwen3-0.6b.yaml"
PATIENCE_SECONDS = 300
TRIES = 5

# A shell that starts this in the background has SIGINT ignored, also by us and by our children. A function run between
# fork and exec would fork this process, which has JAX's threads: newer versions of JAX warn of it.
HEED_CTRL_C = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


@contextmanager
def planning(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """Yield a stopped plan of two slices, handles of its compilers and of their fork server, and their folder.

    A stopped plan cannot end before it gets the next signal if one of its compilers is still alive. On a busy machine,
    all compilers may have ended before the plan stops. Then another plan is started.
    """
    for number in range(TRIES):
        temp = folder / f"{number}"
        temp.mkdir()
        with begun(temp) as parent:
            if parent.poll() is None:
                os.waitid(os.P_PID, parent.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            is_compiling, pidfds = bool(workers_in(temp)), handles_in(temp, parent.pid)
            if is_compiling:
                assert len(pidfds) >= 2, "the fork server and a compiler"
                yield parent, pidfds, temp
                return
            for pidfd in pidfds:
                os.close(pidfd)
    pytest.fail(f"{TRIES} plans were done before they could be looked at")


@contextmanager
def begun(temp: Path) -> Iterator[subprocess.Popen[str]]:
    """A plan that has begun to lower both slices, and has been told to stand still; it is gone when the block ends."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(temp)}
    arguments = ["-m", "forerun", "plan", str(JOB), "--on", "v5e-8,v5p-8", "--no-cache"]
    command = [sys.executable, "-c", HEED_CTRL_C, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes) as parent:  # type: ignore[call-overload]
        try:
            assert parent.stderr is not None
            lowering: set[str] = set()
            while lowering != {"v5e-8", "v5p-8"}:  # on a busy machine one may be done before the other has begun
                line = parent.stderr.readline()
                assert line
                lowering |= {line.partition(":")[0]} if line.endswith(": lowering\n") else set()
            while not workers_in(temp) and parent.poll() is None:  # the fork server may still import its modules
                time.sleep(0.01)
            parent.send_signal(signal.SIGSTOP)
            yield parent
        finally:
            parent.kill()


def workers_in(temp: Path) -> list[int]:
    """Return the compilers that are alive: their output is in a folder of `temp`."""
    found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if output_of(pid).startswith(f"{temp}/")]
    assert len(found) <= 2
    return found


def handles_in(temp: Path, parent: int) -> list[int]:
    """Return handles of all processes that the plan started: compilers, and the fork server."""
    mark = f"TMPDIR={temp}".encode()
    pidfds = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended since
            if pid != parent and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                pidfds.append(os.pidfd_open(pid))
    return pidfds


def output_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""


def assert_ended(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_SECONDS)[0], "a compiler runs on"
        os.close(pidfd)


@pytest.mark.skipif(os.cpu_count() == 1, reason="one compiler at a time on one core")
def test_ctrl_c(tmp_path: Path) -> None:
    with planning(tmp_path) as (parent, compilers, temp):
        parent.send_signal(signal.SIGINT)
        parent.send_signal(signal.SIGCONT)
        out, err = parent.communicate(timeout=PATIENCE_SECONDS)
        assert_ended(compilers)
    assert parent.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "stopped by Ctrl-C"
    assert "Traceback" not in err
    assert list(temp.iterdir()) == []


@pytest.mark.skipif(os.cpu_count() == 1, reason="one compiler at a time on one core")
def test_parent_killed(tmp_path: Path) -> None:
    with planning(tmp_path) as (parent, compilers, temp):
        parent.kill()
        parent.wait(timeout=PATIENCE_SECONDS)
        assert_ended(compilers)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while list(temp.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)  # a compiler that had only just begun still finds out
    assert list(temp.iterdir()) == []
