"""Checks of `train` before it reads the data, and before it compiles. Both can take minutes.

All errors that follow from the job, the data or the run's folder are found here or earlier. `resolve_model` and
`with_data` make the checks that need no run folder, also for `forerun check` and `forerun plan`.
"""

from __future__ import annotations

from pathlib import Path

from forerun.checkpoint.disk_space import needed_bytes, require_disk_space
from forerun.checkpoint.reader import Reader
from forerun.data.corpus import Corpus
from forerun.errors import UserError
from forerun.program.build import Program
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import require_usable
from forerun.storage.retries import RetrySchedule
from forerun.supervise.worker import Worker
from forerun.track.backends.job_trackers import trackers_of
from forerun.trained_model.base_weights import require_weights
from forerun.trained_model.peft_folder import require_adapter


def check_before_data(resolved: ResolvedJob, worker: Worker) -> None:
    """Raise a `UserError` if the run's folder cannot be written, or if a tracker is not installed."""
    if worker.first:
        require_usable(resolved.job)
    trackers_of(resolved.job.track)


def check_before_compile(resolved: ResolvedJob, program: Program, corpus: Corpus, checkpoints: Path | str) -> None:
    """Raise a `UserError` for inputs that would otherwise fail after the compilation.

    - The disk has too little space for the checkpoints.
    - The teacher has no weights.
    - The initial adapter does not match the model.
    - The run would resume with other data. Preference data is compared later, because its digest includes the results
      of the reference model.
    """
    job = resolved.job
    kept = job.checkpoint.keep + job.checkpoint.keep_best
    require_disk_space(checkpoints, needed_bytes(program.saved(program.state), kept))
    if resolved.step_teacher is not None:
        require_weights(resolved.step_teacher)
    reader = Reader(checkpoints, RetrySchedule())
    newest = reader.newest()
    start = job.method.initial_adapter
    if newest is None and start is not None:
        require_adapter(Path(start), resolved, program.method.objective.own(program.state.params))
    if newest is not None and not job.method.data_is_pairs:
        require_same_data(resolved, corpus, newest, reader.record(newest).get("data"))


def require_same_data(resolved: ResolvedJob, corpus: Corpus, step: int, before: object) -> None:
    """Raise unless the data is the same as that of the checkpoint at `step`, whose digest was `before`."""
    if before != corpus.digest:
        same_rows = isinstance(before, str) and before.partition(" ")[0] == corpus.digest.partition(" ")[0]
        restored = "data.shuffle" if same_rows else "data"
        raise UserError(
            "E-RUN-035",
            f"the data is not what the checkpoint of step {step} was trained on",
            why=f"{resolved.job.data.where}: digest {corpus.digest} now, {before} then",
            fix=f"restore the original {restored}, or start over with --fresh (the old folder is kept, renamed)",
        )
