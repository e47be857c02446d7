"""How many slices computed the steps that a run keeps."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.summary import _with_revisions_of, slice_history


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


OLD, NEW = "a" * 40, "b" * 40


def job(model: str | None, teacher: str | None) -> Job:
    return Job.model_validate(
        {
            "model": {"name": "acme/student", "revision": model},
            "distil": {"teacher": "acme/teacher", "revision": teacher},
            "data": "unread",
            "steps": 9,
        }
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (job(None, None), job(OLD, OLD)),  # the branches moved after the run had finished
        (job(NEW, None), job(NEW, OLD)),
        (job(None, NEW), job(OLD, NEW)),
        (job(NEW, NEW), job(NEW, NEW)),
    ],
)
def test_a_revision_counts_only_if_the_job_names_it(written: Job, expected: Job) -> None:
    resolved = ResolvedJob(job(NEW, NEW), written=written)
    assert _with_revisions_of(job(OLD, OLD), resolved) == expected
