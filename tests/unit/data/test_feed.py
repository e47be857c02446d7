from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.data import feed as module
from forerun.data.feed import Feed
from forerun.errors import UserError

PATIENCE_SECONDS = 60  # only a hang takes so long


def source_of(trouble: Callable[[int], None] = lambda step: None) -> Any:
    """Batches that say their step. The class is local, so that it travels to feeders by value."""

    class Source:
        def batch_at(self, step: int) -> dict[str, Any]:
            trouble(step)
            return {"step": np.full((1, 2, 3), step, np.int32), "row": np.arange(step, step + 4, dtype=np.float32)}

    return Source()


def told(batch: dict[str, Any]) -> int:
    """The step that a batch was built for, if all of it is right."""
    assert (batch["step"].shape, batch["row"].dtype) == ((1, 2, 3), np.float32)
    (step,) = set(batch["step"].ravel().tolist())
    assert batch["row"].tolist() == [step, step + 1, step + 2, step + 3]
    return int(step)


def gone(pid: int) -> bool:
    """Sooner or later; a zombie that nobody has waited for is gone too."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE_SECONDS)[0])
    finally:
        os.close(handle)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for process in multiprocessing.active_children():
        process.join(PATIENCE_SECONDS)
    assert multiprocessing.active_children() == []
    for thread in threading.enumerate():
        if thread.name.startswith(("forerun", "grain")):
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), thread


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (7, 20), (1_000_000, 1_000_003), (5, 5)])
def test_batches_come_in_order_from_any_step(start: int, stop: int) -> None:
    with Feed(source_of(), told, start, stop) as feed:
        assert list(feed) == list(range(start, stop))
        assert list(feed) == []
        assert feed.restarts == 0


def test_it_runs_ahead_but_not_further() -> None:
    placed: list[int] = []
    reached = threading.Event()

    def place(batch: dict[str, Any]) -> int:
        placed.append(told(batch))
        if len(placed) == 3:
            reached.set()
        return placed[-1]

    with Feed(source_of(), place, 0, 100, ahead=2) as feed:
        assert next(feed) == 0
        assert reached.wait(PATIENCE_SECONDS)  # 0 is taken, 1 and 2 are placed without being asked for
    assert placed == [0, 1, 2]


@pytest.mark.parametrize("where", ["building", "placing"])
def test_an_error_is_raised_in_its_turn_and_once(where: str) -> None:
    def trouble(step: int) -> None:
        if step == 2:
            raise KeyError("bad row")

    def place(batch: dict[str, Any]) -> int:
        step = told(batch)
        if where == "placing":
            trouble(step)
        return step

    with Feed(source_of(trouble if where == "building" else lambda step: None), place, 0, 5, ahead=4) as feed:
        assert [next(feed), next(feed)] == [0, 1]
        with pytest.raises(KeyError, match="bad row"):
            next(feed)
        assert list(feed) == []


def test_waiting_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: it goes on by three and a half seconds while the consumer waits for the first batch."""
    now, asked = [100.0], threading.Event()

    def clock() -> float:
        seen = now[0]  # before it is told that somebody looks: from then on the clock may go on
        asked.set()
        return seen

    def place(batch: dict[str, Any]) -> int:
        step = told(batch)
        if step == 0:
            assert asked.wait(PATIENCE_SECONDS)
            now[0] += 3.5
        return step

    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"perf_counter": clock}))
    with Feed(source_of(), place, 0, 2) as feed:
        assert (next(feed), feed.waited_seconds) == (0, 3.5)
        assert (next(feed), feed.waited_seconds) == (1, 3.5)


def test_closing_early_ends_the_threads_and_the_batches() -> None:
    feed = Feed(source_of(), told, 0, 10**9)
    assert next(feed) == 0
    feed.close()
    feed.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(feed)


def test_an_exception_of_the_consumer_leaves_no_process() -> None:
    feeders: list[int] = []

    def consume() -> None:
        with Feed(source_of(), told, 3, 10**9, feeders=2) as feed:
            assert [next(feed) for _ in range(15)] == list(range(3, 18))
            feeders.extend(feed.feeders)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert len(feeders) == 2
    assert all(gone(pid) for pid in feeders)


@pytest.mark.timing
def test_feeders_that_die_change_nothing_in_the_order(tmp_path: Path) -> None:
    """One is killed, its successor leaves quietly (Grain itself would wait for ever), the third meets a bad row.

    Each at its work, where it holds none of the locks that Grain shares with it: one that is lost with its holder
    keeps a thread of this process for ever.
    """
    ends = {20: lambda: os.kill(os.getpid(), signal.SIGKILL), 30: lambda: os._exit(0)}

    def trouble(step: int) -> None:
        once = tmp_path / f"{step}"
        if step in ends and not once.exists():
            once.touch()
            ends[step]()
        if step == 50:
            raise UserError("a.jsonl, line 7: no text", why="the value is 12", fix="mend the line")

    with Feed(source_of(trouble), told, 4, 80, feeders=1) as feed:
        steps = [next(feed) for _ in range(3)]
        (victim,) = feed.feeders  # it runs ahead, but not to step 20
        steps += [next(feed) for _ in range(43)]
        assert steps == list(range(4, 50))
        assert feed.restarts == 2
        assert victim not in feed.feeders
        with pytest.raises(UserError) as caught:
            next(feed)
        assert (caught.value.what, caught.value.why) == ("a.jsonl, line 7: no text", "the value is 12")
        assert "in trouble" in caught.value.__notes__[0]
        assert list(feed) == []


@pytest.mark.timing
def test_a_feeder_that_always_dies_is_told_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTARTS", 1)

    def trouble(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    with Feed(source_of(trouble), told, 2, 30, feeders=1) as feed:
        with pytest.raises(UserError, match=r"step 2: .* died 2 times in a row") as caught:
            next(feed)
        assert "signal 9 (SIGKILL)" in caught.value.why
        assert "memory" in caught.value.why
        assert (feed.restarts, list(feed)) == (1, [])


ORPHANS = """
import sys
import numpy as np
from forerun.data.feed import Feed

class Source:
    def batch_at(self, step):
        import jax
        return {"step": np.full(3, step), "devices": np.asarray([jax.default_backend() == "cpu"])}

with Feed(Source(), lambda batch: batch, 0, 10**9, feeders=1) as feed:
    print(*feed.feeders if next(feed)["devices"][0] else [], flush=True)
    sys.stdin.read()
"""


@pytest.mark.timing
def test_feeders_see_no_accelerator_and_do_not_outlive_a_killed_trainer() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": ""}
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        (feeder,) = map(int, trainer.stdout.readline().split())
        assert not gone_now(feeder)
        trainer.kill()
    assert gone(feeder)


def gone_now(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
