"""Recognise a run that has nothing left to do, before its data is read or a program is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.checkpoint import hosts
from forerun.checkpoint.log import Commit, Log
from forerun.checkpoint.manifest import damage
from forerun.checkpoint.patience import Patience
from forerun.checkpoint.place import place_of
from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.files import atomic_write
from forerun.loop.extension import require_steps_left
from forerun.loop.folder import RunFolder, folder_of, is_same_run, keep_template
from forerun.loop.stored_files import read_summary, restore_files
from forerun.track.forwarder import tracking


def finished_summary(job: Job, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the summary of a finished run, and report it to `say`; None if the run has something left to do.

    All hosts call this together and get the same answer. The files of the newest checkpoint are verified: if they are
    damaged, the run resumes from an older one. The data is not compared with the checkpoint's, because nothing is
    trained on it.

    Args:
      job: None is returned if its `steps` are unknown until the data has been read.
    """
    folder = folder_of(job)
    where = folder.checkpoints(job)
    place = place_of(where, Patience(), say)
    commits = place.patiently(Log(place).commits) if job.steps is not None else []
    newest = commits[-1] if commits else None
    summary: dict[str, Any] | None = {}
    good = newest is not None and _is_end(job, newest, where)
    if good and newest is not None and hosts.is_first():
        _restore(job, newest, folder, say)  # this machine may have no folder of the run
        summary = read_summary(folder, newest.step)  # None if the run was killed before it was written
    if good and newest is not None and summary is not None:
        good = place.patiently(lambda: damage(place, newest.folder, newest.files, hosts.part())) is None
    if not hosts.true_on_all(good and summary is not None):
        return None
    assert newest is not None
    assert summary is not None
    if hosts.is_first():
        with tracking(job, folder.metrics, newest.step, say):
            pass  # trackers get the rows that they did not take before
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
    record = newest.record
    if "job" not in record:  # an older version's
        return False
    before = Job.model_validate(record["job"])
    if not is_same_run(_completed(job, before), before):
        return False  # rejected later, with what differs
    require_steps_left(job, newest.step, where)
    evaluated = record.get("looked", newest.step) >= newest.step
    return (newest.step == job.steps and evaluated) or _is_exhausted(job, record)


def _restore(job: Job, newest: Commit, folder: RunFolder, say: Callable[[str], None]) -> None:
    restore_files(folder.checkpoints(job), folder, say)
    if not folder.job.exists():
        atomic_write(folder.job, dump(_completed(job, Job.model_validate(newest.record["job"]))))
    keep_template(job, folder, begun=True)


def _is_exhausted(job: Job, record: Mapping[str, Any]) -> bool:
    patience = job.validation.patience
    return patience is not None and record.get("validation", {}).get("looks_since", 0) >= patience


def _completed(job: Job, before: Job) -> Job:
    """Return the job with the values that only the data or the hub decide, as the run had them."""
    model = {name: getattr(job.model, name) or getattr(before.model, name) for name in ("vocab", "revision")}
    update: dict[str, Any] = {"model": job.model.model_copy(update=model)}
    if job.distil is not None and before.distil is not None:
        revision = job.distil.revision or before.distil.revision
        update["distil"] = job.distil.model_copy(update={"revision": revision})
    return job.model_copy(update=update)
