"""Ctrl-C and a second launch, in phases that the output makes certain. `interrupt_trials.py` tries random moments."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Bench, Run

pytestmark = pytest.mark.timing

INTERRUPTED, USER_ERROR = 130, 2


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A job that would train for hours."""
    return Bench(tmp_path_factory.mktemp("interrupts") / "bench", steps=1_000_000, every=4)


@pytest.fixture(autouse=True)
def _heed_ctrl_c() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and so would all processes that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(run: Run) -> str:
    """Send Ctrl-C to the process group, as a terminal does, and return what the run printed once it is over."""
    os.killpg(run.process.pid, signal.SIGINT)
    run.finish(INTERRUPTED)
    return run.said_now()


def leftovers(bench: Bench) -> list[Path]:
    return [*(bench.folder / "runs").glob(".*.lock"), *bench.folder.glob("runs/*/*.part")]


def test_a_compilation_is_not_waited_for(bench: Bench) -> None:
    with bench.run("compiling") as run:
        run.start()
        run.wait_for(lambda: "compile ..." in run.said_now())
        said = press(run)
    assert "stopped by Ctrl-C" in said
    assert "compile failed" not in said  # printed when a compilation returns and raises KeyboardInterrupt
    assert "Traceback" not in said
    assert leftovers(bench) == []


def test_steps_are_saved_and_a_second_launch_is_rejected_before(bench: Bench) -> None:
    with bench.run("steps") as run, bench.run("steps") as second:
        run.start()
        run.wait_for(lambda: run.newest() > 0)
        second.log_file = second.log_file.with_suffix(".second.log")
        second.start()
        second.finish(USER_ERROR)
        assert f"process {run.process.pid} on " in second.said()
        assert "data ..." not in second.said()
        said = press(run)
        saved = re.search(r"the checkpoint of step (\d+) is saved", said)
        assert saved is not None, said
        assert int(saved[1]) == run.newest()
        # On a busy machine a save may take longer than the process has. Then an older checkpoint is the newest.
        assert run.newest() == run.last_step() or "given up" in said or "stopped as asked" not in said
        assert "Traceback" not in said
    assert leftovers(bench) == []
