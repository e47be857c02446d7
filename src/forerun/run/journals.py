"""The files that a run appends to at each step: metrics and ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forerun.config.schema import Job
from forerun.data.order.ledger import Ledger
from forerun.inputs.run_folder import RunFolder
from forerun.inputs.saved_files import LEDGER, METRICS, SavedFiles
from forerun.supervise.worker.worker import Worker
from forerun.track.display.display import Display
from forerun.track.forwarder import tracking
from forerun.track.metrics import MetricsLog


@contextmanager
def open_metrics(
    job: Job, folder: RunFolder, saved: SavedFiles, last: int, display: Display, worker: Worker
) -> Iterator[MetricsLog | None]:
    """Open metrics.jsonl and start the trackers that read it. Yield None on all hosts but the first.

    Args:
      saved: what the checkpoint that the run resumes from records about the file.
      last: the last step of the run.
    """
    if not worker.first:
        yield None
        return
    path, tell = folder.metrics, display.warn
    with (
        MetricsLog(path, resume_at=saved.step, seals=saved.seals(METRICS), tell=tell) as log,
        tracking(job, path, last, tell),
    ):
        yield log


@contextmanager
def open_ledger(
    job: Job, folder: RunFolder, saved: SavedFiles, display: Display, worker: Worker
) -> Iterator[Ledger | None]:
    """Open the ledger. Yield None if the job does not ask for one, and on all hosts but the first."""
    if not job.data.ledger or not worker.first:
        yield None
        return
    with Ledger(folder.ledger, saved.step + 1, seals=saved.seals(LEDGER), tell=display.warn) as ledger:
        yield ledger
