"""The heartbeat with an injected clock and event: the test decides when an interval has passed, so nothing waits."""

from __future__ import annotations

import io
import queue
import threading

import pytest

from forerun.track.display.heartbeat import HEARTBEAT_SECONDS
from forerun.track.display.plain import PlainDisplay


class Intervals:
    """An event whose time is controlled: `pass_one` ends one interval and returns after its line was printed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._endings: queue.Queue[bool] = queue.Queue()
        self._waiting = threading.Semaphore(0)
        self.was_set = False

    def set(self) -> None:
        self.was_set = True
        self._endings.put(True)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == HEARTBEAT_SECONDS
        self._waiting.release()
        return self._endings.get()

    def pass_one(self) -> None:
        self._waiting.acquire()
        self._clock.now += HEARTBEAT_SECONDS
        self._endings.put(False)
        self._waiting.acquire()  # the thread waits again, so the line is printed
        self._waiting.release()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watched() -> tuple[PlainDisplay, io.StringIO, Clock, list[Intervals]]:
    stream, clock, made = io.StringIO(), Clock(), []

    def new_end() -> Intervals:
        made.append(Intervals(clock))
        return made[-1]

    return PlainDisplay(stream, clock=clock, new_end=new_end), stream, clock, made


def test_a_long_phase_prints_its_time_every_interval(
    watched: tuple[PlainDisplay, io.StringIO, Clock, list[Intervals]],
) -> None:
    display, stream, clock, made = watched
    with display.phase("compile") as phase:
        made[0].pass_one()
        phase.expected_seconds, phase.detail = 75.0, "cache miss"
        made[0].pass_one()
        clock.now += 3.0
    assert stream.getvalue().splitlines() == [
        "compile ...",
        "compile ... 30.0 s so far",
        "compile ... 60.0 s so far, 75.0 s last time  cache miss",
        "compile 63.0 s  cache miss",
    ]
    assert made[0].was_set


def test_a_short_phase_prints_no_heartbeat_and_leaves_no_thread(
    watched: tuple[PlainDisplay, io.StringIO, Clock, list[Intervals]],
) -> None:
    display, stream, _, _ = watched
    before = threading.active_count()
    with display.phase("data"):
        pass
    assert threading.active_count() == before
    assert len(stream.getvalue().splitlines()) == 2


def test_a_phase_that_fails_ends_its_thread(watched: tuple[PlainDisplay, io.StringIO, Clock, list[Intervals]]) -> None:
    display, stream, _, made = watched
    before = threading.active_count()

    def fail() -> None:
        with display.phase("state"):
            made[0].pass_one()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert threading.active_count() == before
    assert stream.getvalue().splitlines()[-1] == "state failed after 30.0 s"
