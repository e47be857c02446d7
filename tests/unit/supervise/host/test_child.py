"""Tests of one worker as its supervisor sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from forerun.supervise.child import Child
from forerun.supervise.console import Console
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Begin, WorkerExit

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
