"""Rules for jobs that start before their data is complete (`data.begin: early`)."""

from __future__ import annotations

from typing import Any

from forerun.errors import JobValueError


def require_early_start(job: Any) -> None:
    """Raise if a job starts early, but needs something that is known only when its data is complete."""
    data = job.data
    if data.begin != "early":
        return
    if job.steps is None:
        raise JobValueError(
            "E-JOB-151",
            "data.begin: early needs steps, because the size of an epoch is known only at the end",
            fix="set steps=N",
        )
    distil = getattr(job, "distil", None)
    conflicts = {
        "preferences": job.preferences is not None,
        "distil.cache": distil is not None and distil.cache is not None,
        "data.shuffle: blocks": data.shuffle == "blocks",
        "data.validation_by: rows": data.validation > 0 and data.validation_by == "rows",
    }
    for key, is_set in conflicts.items():
        if is_set:
            raise JobValueError(
                "E-JOB-152",
                f"data.begin: early is not possible with {key}, which needs all rows first",
                fix="remove one of them",
            )
