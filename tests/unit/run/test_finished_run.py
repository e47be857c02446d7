"""Detection of a finished run: which revisions of its models count."""

from __future__ import annotations

import pytest

from forerun.config.schema import Job
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.finished_run import _with_revisions_of

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
