"""How many slices computed the steps that a run keeps."""

from __future__ import annotations

from typing import Any

from forerun.run.summary import slice_history


def session(number: int, slices: int, resumed: int | None = None) -> list[dict[str, Any]]:
    start = {"event": "start", "session": number, "slices": slices}
    return [start] if resumed is None else [start, {"event": "resume", "session": number, "step": resumed}]


def test_steps_that_are_computed_again_count_for_the_later_session() -> None:
    events = [*session(1, 3), *session(2, 2, 10), *session(3, 1, 5), *session(4, 3, 20)]
    assert slice_history(events) == [
        {"step": 0, "slices": 3},
        {"step": 5, "slices": 1},
        {"step": 20, "slices": 3},
    ]


def test_a_session_that_did_not_reach_its_state_does_not_count() -> None:
    assert slice_history([*session(1, 2), *session(2, 1), *session(3, 2, 5)]) == [{"step": 0, "slices": 2}]


def test_a_run_without_slices_has_no_history() -> None:
    assert slice_history([{"event": "start", "session": 1}]) == []
