"""The slices that take part in this attempt of a run, and what the user reads about them."""

from __future__ import annotations

from typing import Any

from forerun.config.schema import Job
from forerun.supervise.worker.worker import Worker
from forerun.track.display.display import Display


def session_slices(job: Job, worker: Worker) -> dict[str, Any]:
    """Return the values of the `start` event about slices. Empty for a run whose supervisors do not count slices."""
    return {} if worker.slices is None else {"slices": worker.slices, "of_slices": job.mesh.slices}


def report_slices(job: Job, worker: Worker, display: Display) -> None:
    """Warn if fewer slices take part than the job has, or if `mesh.min_slices` has no effect."""
    if job.mesh.min_slices is None:
        return
    if worker.slices is None:
        display.warn("mesh.min_slices has no effect: one process runs all slices, so none of them can be lost alone")
    elif worker.slices != job.mesh.slices:
        display.warn(
            f"{worker.slices} of {job.mesh.slices} slices take part; each computes more rows of the same batch"
        )


def stop_message(step: int, worker: Worker) -> tuple[str, str]:
    """Return the reason of the `stop` event, and the line for the user about a stop at this step."""
    if worker.stop.ends_job:
        return "asked", f"stopped as asked after step {step}: the same command resumes from the newest checkpoint"
    return "slices", f"stopped after step {step}: the run continues from here with more slices"
