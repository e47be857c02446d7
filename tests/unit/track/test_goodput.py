"""Goodput: histories that were computed by hand, and properties of all histories."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.track.goodput import CATEGORIES, LOST, Goodput, goodput_of, shares_of

Event = dict[str, Any]


def at(moment: float, event: str, **values: Any) -> Event:
    return {"unix_seconds": 1000 + moment, "event": event, "session": 1, **values}


def goodput(*events: Event) -> Goodput:
    found = goodput_of(events)
    assert found is not None
    return found


def parts(found: Goodput) -> dict[str, float]:
    """The categories that have any time."""
    return {name: seconds for name, seconds in found.seconds.items() if seconds}


def require_sum(found: Goodput) -> None:
    assert set(found.seconds) == set(CATEGORIES)
    assert min(found.seconds.values()) >= 0
    # Whole microseconds are added as integers, so the sum is exact.
    assert sum(round(seconds * 1e6) for seconds in found.seconds.values()) == round(found.wall_seconds * 1e6)
    assert found.share == pytest.approx(found.seconds["useful"] / found.wall_seconds)


def test_run_without_a_restart() -> None:
    seconds = {"startup": 10.0, "compile": 20.0, "restore": 5.0, "useful": 50.0, "saves": 3.0, "data_wait": 2.0}
    found = goodput(
        at(0, "start"),
        at(10, "phase", name="compile"),
        at(35, "phase", name="steps"),
        at(92, "time", step=100, seconds=seconds),
        at(100, "end"),
    )
    assert found.wall_seconds == 100
    assert parts(found) == seconds | {"other": 10.0}
    assert found.share == 0.5
    require_sum(found)


def test_steps_after_the_resumed_checkpoint_are_replayed() -> None:
    # Ten steps a second. The first session reaches step 100 and is killed; the second resumes from step 60.
    found = goodput(
        at(0, "start"),
        at(10, "phase", name="steps"),
        at(10, "time", step=0, seconds={"startup": 10.0}),
        at(20, "time", step=100, seconds={"startup": 10.0, "useful": 10.0}),
        at(21, "save", step=60, seconds=1.0),
        at(51, "start"),
        at(61, "resume", step=60),
        at(65, "time", step=100, seconds={"startup": 10.0, "useful": 4.0}),
        at(65, "end", step=100),
    )
    assert parts(found) == {"useful": 10.0, "startup": 20.0, "restarts": 30.0, "replayed": 4.0, "other": 1.0}
    require_sum(found)


def test_each_later_resume_decides_what_is_kept() -> None:
    # Sessions: 0 to 100, 60 to 80, 40 to 100, at one second for each step. Only 40 + 0 + 60 seconds are kept.
    found = goodput(
        at(0, "start"),
        at(100, "time", step=100, seconds={"useful": 100.0}),
        at(100, "start"),
        at(100, "resume", step=60),
        at(120, "time", step=80, seconds={"useful": 20.0}),
        at(120, "start"),
        at(120, "resume", step=40),
        at(180, "time", step=100, seconds={"useful": 60.0}),
    )
    assert parts(found) == {"useful": 100.0, "replayed": 80.0}


def test_run_without_a_checkpoint_loses_everything() -> None:
    found = goodput(
        at(0, "start"),
        at(5, "time", step=5, seconds={"useful": 5.0}),
        at(7, "start"),
        at(7, "resume", step=0),
        at(8, "time", step=1, seconds={"useful": 1.0}),
    )
    assert parts(found) == {"useful": 1.0, "replayed": 5.0, "restarts": 2.0}


def test_session_that_is_killed_before_it_restores_undoes_nothing() -> None:
    found = goodput(
        at(0, "start"),
        at(5, "time", step=5, seconds={"useful": 5.0}),
        at(6, "start"),
        at(7, "phase", name="compile"),
        at(9, "start"),
        at(9, "resume", step=5),
    )
    assert parts(found) == {"useful": 5.0, "startup": 1.0, "restarts": 3.0}


def test_phases_say_what_is_not_timed_yet() -> None:
    found = goodput(
        at(0, "start"),
        at(2, "phase", name="data"),
        at(5, "phase", name="compile"),
        at(9, "phase", name="restore"),
        at(10, "phase", name="steps"),
        at(17, "stop", step=3),
    )
    assert parts(found) == {"startup": 5.0, "compile": 4.0, "restore": 1.0, "other": 7.0}


def test_clock_that_goes_backwards_stands_still() -> None:
    found = goodput(
        at(0, "start"),
        at(1, "phase", name="steps"),
        at(10, "time", step=1, seconds={"useful": 8.0}),
        at(4, "start"),
        at(5, "phase", name="steps"),
        at(6, "time", step=1, seconds={"useful": 2.0}),
        at(12, "end"),
    )
    assert found.wall_seconds == 12
    assert parts(found) == {"useful": 8.0, "other": 4.0}
    require_sum(found)


@pytest.mark.parametrize("events", [[], [at(0, "end")], [at(0, "start")], [{"event": "start"}]])
def test_history_without_time_has_no_goodput(events: list[Event]) -> None:
    assert goodput_of(events) is None


def test_shares_have_the_names_of_the_metrics() -> None:
    shares = shares_of({"useful": 3.0, "compile": 1.0})
    assert list(shares) == ["goodput", *(f"lost_{name}" for name in LOST)]
    assert shares["goodput"] == 0.75
    assert shares["lost_compile"] == 0.25
    assert shares_of({}) == {}


seconds = st.floats(0, 1e6)
steps = st.integers(0, 1000)
# Beyond 1e9 seconds, whole microseconds are not exact in a float.
floats = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
broken = st.one_of(st.none(), st.text(), floats, st.booleans(), st.lists(st.integers(), max_size=2))
event = st.fixed_dictionaries(
    {
        "unix_seconds": st.one_of(st.floats(0, 1e6), st.floats(1.7e9, 1.8e9), broken),
        "event": st.sampled_from(["start", "phase", "resume", "time", "save", "stop", "end"]),
    },
    optional={
        "step": st.one_of(steps, broken),
        "name": st.sampled_from(["data", "compile", "restore", "steps", "finish"]),
        "seconds": st.one_of(st.dictionaries(st.sampled_from(CATEGORIES), st.one_of(seconds, broken)), broken),
    },
)


@given(st.lists(event, max_size=20))
def test_seconds_add_up_to_the_wall_time(events: list[Event]) -> None:
    found = goodput_of(events)
    if found is not None:
        require_sum(found)
        assert sum(found.shares.values()) == pytest.approx(1)
