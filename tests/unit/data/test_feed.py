from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from error_assertions import raises_error

from forerun.data import feed as module
from forerun.data.feed import Feed
from forerun.errors import UserError

PATIENCE_SECONDS = 60  # only a hang takes so long


def source_of(trouble: Callable[[int], None] = lambda step: None) -> Any:
    """Return a source of batches that contain their step. `trouble` is called before each one is built."""

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


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("forerun-feed")]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert feed_threads() == []


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (7, 20), (1_000_000, 1_000_003), (5, 5)])
def test_batches_come_in_order_from_any_step(start: int, stop: int) -> None:
    with Feed(source_of(), told, start, stop) as feed:
        assert list(feed) == list(range(start, stop))
        assert list(feed) == []


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


def test_an_exception_of_the_consumer_ends_the_threads() -> None:
    def consume() -> None:
        with Feed(source_of(), told, 3, 10**9) as feed:
            assert [next(feed) for _ in range(15)] == list(range(3, 18))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert feed_threads() == []


def test_the_user_error_of_a_batch_keeps_its_code_and_its_place() -> None:
    """The build of step 2 fails before the consumer asks for step 0; the error is raised at step 2 with its frames."""
    failed = threading.Event()
    error = UserError("E-DATA-001", "train.tokens is damaged", why="block 3 differs", fix="remove its folder")

    def trouble(step: int) -> None:
        if step == 2:
            failed.set()
            raise error

    with Feed(source_of(trouble), told, 0, 10) as feed:
        assert failed.wait(PATIENCE_SECONDS)
        assert [next(feed), next(feed)] == [0, 1]
        with raises_error("E-DATA-001") as caught:
            next(feed)
        assert caught.value is error
        assert "trouble" in [frame.name for frame in caught.traceback]
        assert list(feed) == []


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_in_a_thread_reaches_the_consumer(raised: BaseException) -> None:
    def trouble(step: int) -> None:
        raise raised

    with Feed(source_of(trouble), told, 0, 5) as feed, pytest.raises(type(raised)):
        next(feed)


def test_a_stop_iteration_of_a_batch_is_not_the_end_of_the_data() -> None:
    def trouble(step: int) -> None:
        if step == 1:
            raise StopIteration

    with Feed(source_of(trouble), told, 0, 5) as feed:
        assert next(feed) == 0
        with pytest.raises(RuntimeError, match="StopIteration"):
            next(feed)


def test_the_memory_is_bounded() -> None:
    """Nothing is taken: `ahead` batches are placed, `ahead` wait on the host, and no further batch is built."""
    built: list[int] = []
    reached = threading.Event()

    def trouble(step: int) -> None:
        built.append(step)
        if len(built) == 6:
            reached.set()

    with Feed(source_of(trouble), told, 0, 100, ahead=3):
        assert reached.wait(PATIENCE_SECONDS)
    assert built == list(range(6))


@pytest.mark.parametrize("where", ["building", "placing"])
def test_closing_waits_for_the_batch_at_work_and_drops_it(where: str) -> None:
    begun, closing = threading.Event(), threading.Event()
    done: list[int] = []
    placed: list[int] = []

    def work(step: int) -> None:
        begun.set()
        assert closing.wait(PATIENCE_SECONDS)
        done.append(step)

    def place(batch: dict[str, Any]) -> int:
        step = told(batch)
        if where == "building":
            placed.append(step)
        else:
            work(step)
        return step

    feed = Feed(source_of(work if where == "building" else lambda step: None), place, 0, 10)
    assert begun.wait(PATIENCE_SECONDS)
    closer = threading.Thread(target=feed.close)
    closer.start()
    while not feed._closed:
        time.sleep(0.001)
    assert closer.is_alive()
    closing.set()
    closer.join(PATIENCE_SECONDS)
    assert (done, placed, feed_threads()) == ([0], [], [])


def test_closing_abandons_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    begun, answer = threading.Event(), threading.Event()
    placed: list[int] = []

    def hang(step: int) -> None:
        begun.set()
        assert answer.wait(PATIENCE_SECONDS)

    feed = Feed(source_of(hang), lambda batch: placed.append(told(batch)), 0, 10)
    assert begun.wait(PATIENCE_SECONDS)
    feed.close()
    left = feed_threads()
    assert left
    assert all(thread.daemon for thread in left)
    answer.set()  # the fixture waits for the threads
    for thread in left:
        thread.join(PATIENCE_SECONDS)
    assert placed == []


INTERRUPTED = """
import signal, sys, threading
from forerun.data import feed as module

class Source:
    def batch_at(self, step):
        if step == 1:
            threading.Event().wait()
        return step

class Stopped(BaseException):
    pass

def stop(*_):
    raise Stopped

signal.signal(signal.SIGUSR2, stop)
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored if the tests run in the background
module.CLOSE_SECONDS = 0.05
with module.Feed(Source(), lambda batch: batch, 0, 10) as feed:
    assert next(feed) == 0
    try:
        print("waiting", flush=True)
        next(feed)
    except (KeyboardInterrupt, Stopped) as error:
        print(type(error).__name__, flush=True)
sys.exit(7)
"""


@pytest.mark.timing
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGUSR2, "Stopped")])
def test_a_signal_ends_the_wait_for_a_batch_that_never_comes(number: int, raised: str) -> None:
    """The process ends too, although a thread is blocked for ever."""
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{raised}\n"
        assert process.wait(PATIENCE_SECONDS) == 7
