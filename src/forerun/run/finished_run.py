"""Detection of a finished run, before data is read or a program is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.checkpoint import hosts
from forerun.checkpoint.log import Commit, Log
from forerun.checkpoint.manifest import damage
from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.files import atomic_write
from forerun.inputs.run_folder import RunFolder, copy_template, folder_of, is_same_run
from forerun.inputs.stored_files import read_summary, restore_files
from forerun.run.extension import require_steps_left
from forerun.storage.open_folder import folder_at
from forerun.storage.retries import RetrySchedule
from forerun.track.forwarder import tracking


def finished_summary(job: Job, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None if the run is not finished.

    All hosts call this together and get the same answer. The files of the newest checkpoint are verified: if they are
    damaged, the run is not finished, because it resumes from an older checkpoint. The data is not compared with the
    checkpoint's, because no step is trained on it.

    Args:
      job: the job. If its `steps` are not known before the data is read, the result is None.
      say: receives messages for the user.
    """
    folder = folder_of(job)
    where = folder.checkpoints(job)
    place = folder_at(where, RetrySchedule(), say)
    commits = place.with_retries(Log(place).commits) if job.steps is not None else []
    newest = commits[-1] if commits else None
    summary: dict[str, Any] | None = {}
    good = newest is not None and _is_end(job, newest, where)
    if good and newest is not None and hosts.is_first():
        _restore(job, newest, folder, say)  # this machine may not have the run's folder
        summary = read_summary(folder, newest.step)  # None if the run was killed before it was written
    if good and newest is not None and summary is not None:
        good = place.with_retries(lambda: damage(place, newest.folder, newest.files, hosts.part())) is None
    if not hosts.true_on_all(good and summary is not None):
        return None
    assert newest is not None
    assert summary is not None
    if hosts.is_first():
        with tracking(job, folder.metrics, newest.step, say):
            pass  # send the rows that the trackers have not received yet
    first, final = (
        "unknown" if loss is None else f"{loss:.4f}" for loss in (summary.get("first_loss"), summary.get("final_loss"))
    )
    say(f"this run has finished at step {newest.step}, loss {first} -> {final}; nothing was read or compiled")
    if newest.step == job.steps:
        longer = f"set steps to more than {job.steps}"
    else:
        longer = f"raise validation.patience, which ended the run before step {job.steps}"
    say(f"the result is in {folder.path}, its checkpoints in {where}; to train longer, {longer}")
    return summary | {"resumed_at": newest.step}


def _is_end(job: Job, newest: Commit, where: object) -> bool:
    """Return whether the newest checkpoint is the end of this run: its last step, or early stopping."""
    record = newest.record
    if "job" not in record:  # written by an older version
        return False
    before = Job.model_validate(record["job"])
    if not is_same_run(_completed(job, before), before):
        return False  # a later check raises an error that lists the differences
    require_steps_left(job, newest.step, where)
    evaluated = record.get("looked", newest.step) >= newest.step
    return (newest.step == job.steps and evaluated) or _is_exhausted(job, record)


def _restore(job: Job, newest: Commit, folder: RunFolder, say: Callable[[str], None]) -> None:
    """Restore the run's files from the checkpoints, as far as they are missing in the run's folder."""
    restore_files(folder.checkpoints(job), folder, say)
    if not folder.job.exists():
        atomic_write(folder.job, dump(_completed(job, Job.model_validate(newest.record["job"]))))
    copy_template(job, folder, begun=True)


def _is_exhausted(job: Job, record: Mapping[str, Any]) -> bool:
    patience = job.validation.patience
    return patience is not None and record.get("validation", {}).get("looks_since", 0) >= patience


def _completed(job: Job, before: Job) -> Job:
    """Return the job with the vocabulary and the revisions of the earlier process, if the job does not set them.

    Without these values, the two jobs could not be compared: they are known only after the data or the hub was read.
    """
    model = {name: getattr(job.model, name) or getattr(before.model, name) for name in ("vocab", "revision")}
    job = job.model_copy(update={"model": job.model.model_copy(update=model)})
    teacher, teacher_before = job.method.teacher, before.method.teacher
    if teacher is not None and teacher_before is not None:
        job = job.with_teacher_revision(teacher.revision or teacher_before.revision)
    return job
