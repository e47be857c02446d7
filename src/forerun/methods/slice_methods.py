"""The methods that several TPU slices can compute."""

from __future__ import annotations

from forerun.errors import UserError
from forerun.resolve.resolved_job import ResolvedJob


def require_slices(resolved: ResolvedJob, slices: int) -> None:
    """Raise if the job has a method that does not run on this number of slices."""
    if slices > 1 and resolved.job.preferences is not None:
        raise UserError(
            "E-PROGRAM-011",
            "preferences do not work with several slices",
            why="the reference model of the pairs runs on one slice only",
            fix="use one slice, or remove preferences",
        )
