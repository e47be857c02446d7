"""The clock of a run, with a clock that the test sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forerun.track.event_log import read_events
from forerun.track.goodput import goodput_of
from forerun.track.run_times import LONGEST_SECONDS, RunTimes

EPOCH = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def unix(self) -> float:
        return EPOCH + self.now


Begun = Callable[..., RunTimes]


@pytest.fixture
def begun() -> Iterator[Begun]:
    """Returns the times of a session that began some seconds ago."""
    with ExitStack() as closing:

        def begun(clock: Clock, ago: float = 3.0) -> RunTimes:
            times = RunTimes(clock.unix() - ago, clock=clock, unix=clock.unix, pid=7)
            closing.callback(times.close)
            return times

        yield begun


def events(path: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(path) if event["event"] == name]


def test_each_second_has_one_category(tmp_path: Path, begun: Begun) -> None:
    clock, path = Clock(), tmp_path / "events.jsonl"
    times = begun(clock, ago=3)
    clock.now += 1
    times.phase("data")
    clock.now += 2  # startup: 3 + 1 + 2
    times.open(path)
    times.phase("compile")
    clock.now += 10
    with times.spent("startup"):
        clock.now += 1  # startup: 7
    times.phase("restore")
    clock.now += 4
    times.resume(0)
    times.phase("steps")
    clock.now += 20
    times.finish_step(1, 2.0, is_useful=True)  # 18 useful, 2 of waiting
    with times.spent("validation"):
        clock.now += 5
    with times.spent("saves"):
        clock.now += 6
        times.mark(1, is_forced=True)
    times.saved(1, 6.0)
    clock.now += 7
    times.finish_step(2, 2.0, is_useful=False)  # 7 of a rejected step
    clock.now += 8
    times.finish_step(3, 2.0, is_useful=True)
    times.phase("finish")
    clock.now += 0.5
    found = times.end(3)
    assert found is not None
    assert {name: seconds for name, seconds in found.seconds.items() if seconds} == {
        "useful": 26.0,
        "startup": 7.0,
        "compile": 10.0,
        "restore": 4.0,
        "saves": 6.0,
        "data_wait": 2.0,
        "validation": 5.0,
        "other": 7.5,
    }
    assert found.wall_seconds == 67.5
    assert times.shares()["goodput"] == pytest.approx(26 / 67.5, abs=1e-6)
    (start,) = events(path, "start")
    assert (start["session"], start["pid"], start["unix_seconds"]) == (1, 7, EPOCH + 97)
    assert [event["name"] for event in events(path, "phase")] == ["data", "compile", "restore", "steps", "finish"]
    assert not events(path, "resume")
    assert events(path, "save") == [
        {"unix_seconds": EPOCH + 149, "event": "save", "step": 1, "seconds": 6, "session": 1}
    ]


def test_a_resumed_session_counts_what_the_earlier_ones_lost(tmp_path: Path, begun: Begun) -> None:
    clock, path = Clock(), tmp_path / "events.jsonl"
    times = begun(clock, ago=0)
    times.open(path)
    times.resume(0)
    times.phase("steps")
    for step in range(1, 11):  # a second each
        clock.now += 1
        times.finish_step(step, 0.0, is_useful=True)
        times.mark(step, is_forced=True)
    clock.now += 30  # killed after step 10, and started again
    again = begun(clock, ago=2)
    again.open(path)
    again.resume(4)
    again.phase("steps")
    clock.now += 6
    again.finish_step(10, 0.0, is_useful=True)
    live = again.shares()
    found = again.end(10)
    assert found is not None
    parts = {name: seconds for name, seconds in found.seconds.items() if seconds}
    assert parts == {"useful": 10.0, "startup": 2.0, "restarts": 28.0, "replayed": 6.0}
    assert live == {name: pytest.approx(share, abs=1e-6) for name, share in found.shares.items()}
    assert events(path, "resume")[0]["step"] == 4


def test_time_lines_are_rare(tmp_path: Path, begun: Begun) -> None:
    clock, path = Clock(), tmp_path / "events.jsonl"
    times = begun(clock)
    times.open(path)
    times.phase("steps")
    for step in range(1, 10_001):  # 1000 seconds
        clock.now += 0.1
        times.finish_step(step, 0.0, is_useful=True)
        times.mark(step)
    moments = [event["unix_seconds"] for event in events(path, "time")]
    gaps = [after - before for before, after in pairwise(moments)]
    assert max(gaps) < LONGEST_SECONDS + 0.2
    assert 200 < len(moments) < 500


def test_an_error_ends_the_history_with_its_code(tmp_path: Path, begun: Begun) -> None:
    path = tmp_path / "events.jsonl"
    times = begun(Clock())
    times.fail(ValueError("before the folder is open, nothing is written"))
    assert not path.exists()
    times.open(path)
    times.fail(ValueError("a token"))
    (stop,) = events(path, "stop")
    assert stop["reason"] == "ValueError"
    assert "token" not in json.dumps(read_events(path))
    assert goodput_of(read_events(path)) is not None


def test_a_host_that_writes_no_files_keeps_no_events() -> None:
    times = RunTimes()
    times.phase("steps")
    for step in range(100):
        times.saved(step, 1.0)
        times.mark(step, is_forced=True)
    assert times.shares() == {}
    assert times.end(100) is None
    assert len(times._pending) < 5
