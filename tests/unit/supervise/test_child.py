"""Tests of one worker as its supervisor sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from forerun.supervise.child import Child, oom_kills
from forerun.supervise.console import Console
from forerun.supervise.leader.leader_view import Member
from forerun.supervise.leader.verdicts import death
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import OUT_OF_MEMORY, Begin, WorkerExit

pytestmark = pytest.mark.timing

LIVES = "import os, signal, sys; print('up', file=sys.stderr, flush=True); {}"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def ended(what: str, *, by_itself: bool) -> WorkerExit:
    """A worker that is told to end, before the loop could hear that it has already done so by itself."""
    console = Console("test")
    child = Child(Limits(), lambda message: None, console)
    await child.start([sys.executable, "-c", LIVES.format(what)], dict(os.environ), Begin(1, 0, 1, ""))
    while by_itself and alive(child.pid):  # without giving the loop a turn
        pass
    await child.end()
    console.close()  # what it says late would be found in the next test's output
    assert child.exit is not None
    return child.exit


@pytest.mark.parametrize(
    ("what", "code"), [("sys.exit(74)", 74), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)]
)
def test_a_worker_that_died_by_itself_was_not_ended_by_us(
    what: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else the death that all others follow from would be lost among them."""
    found = asyncio.run(ended(what, by_itself=True))
    assert (found.code, found.ended) == (code, False)


def test_a_worker_that_we_ended_did_not_die_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    found = asyncio.run(ended("signal.pause()", by_itself=False))
    assert (found.code, found.ended) == (-signal.SIGKILL, True)


def test_the_counter_is_found_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    proc, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    assert oom_kills(proc, mounted) == 0
    proc.write_text("4:memory:/jobs/one\n1:cpu,cpuacct:/\n0::/\n")
    assert oom_kills(proc, mounted) == 0
    old = mounted / "memory" / "jobs" / "one" / "memory.oom_control"
    old.parent.mkdir(parents=True)
    old.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert oom_kills(proc, mounted) == 3
    proc.write_text("0::/jobs/two\n")
    new = mounted / "jobs" / "two" / "memory.events"
    new.parent.mkdir(parents=True)
    new.write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 7\n")
    assert oom_kills(proc, mounted) == 2


def test_a_worker_that_the_kernel_killed_is_told_so() -> None:
    def killed(tail: str) -> Member:
        return Member(0, "a", "vm-0", 100, 0.0, exit=WorkerExit(-signal.SIGKILL, False, tail))

    assert "out of memory; give it more" in death(killed(f"step 7\n{OUT_OF_MEMORY}\n"))
    assert "kill -9, or" in death(killed("step 7\n"))
