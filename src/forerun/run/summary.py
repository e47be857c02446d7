"""`summary.json`: the results of a finished run, and detection of a run that an earlier process finished."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from forerun.checkpoint import hosts
from forerun.checkpoint.log import Commit, Log
from forerun.checkpoint.manifest import damage
from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.files import atomic_write
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.device_memory import PEAK
from forerun.hardware.devices import DeviceChoice
from forerun.methods.method import parameter_count, trainable_count
from forerun.program.build import Program
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.compile_step import CompiledStep
from forerun.run.extension import require_steps_left
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.run_folder.run_folder import RunFolder, copy_template, folder_of, is_same_run, recorded_job
from forerun.run_folder.stored_files import read_summary, restore_files
from forerun.storage.open_folder import folder_at
from forerun.storage.retries import RetrySchedule
from forerun.track.event_log import read_events
from forerun.track.forwarder import tracking
from forerun.track.metrics import read_metrics
from forerun.version import __version__


def loss_unit(counted: str) -> str:
    """Return the unit of the loss for an objective that counts tokens, pairs or something else."""
    return "nats per token" if counted == "tokens" else f"per {counted.removesuffix('s')}"


def summary_of(
    resolved: ResolvedJob,
    program: Program,
    step: CompiledStep,
    throughput: Throughput,
    validation: Validation,
    chosen: DeviceChoice,
    folder: RunFolder,
) -> dict[str, Any]:
    """Return the content of summary.json.

    The losses are those of the complete run. The times are those of this process, without its first step.
    """
    losses = [line["loss"] for line in read_metrics(folder.metrics) if "loss" in line]
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    times = throughput.step_seconds[1:] or throughput.step_seconds
    step_seconds = statistics.median(times) if times else None
    return {
        "name": resolved.job.name,
        "steps": throughput.step,
        "resumed_at": throughput.first,
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "validation": asdict(validation.best) if validation.best.step else None,
        "loss_unit": loss_unit(program.method.objective.unit),
        "tokens": throughput.step * program.derived.tokens_per_step,
        "parameters": parameter_count(resolved),
        "trainable_parameters": trainable_count(resolved),
        "step_seconds": step_seconds,
        "predicted_step_seconds": step.predicted_seconds(chip) if chip is not None else None,
        "tokens_per_second": throughput.tokens_per_second(step_seconds) if step_seconds else None,
        "samples_per_second": throughput.samples_per_second(step_seconds) if step_seconds else None,
        "mfu": throughput.mfu(step_seconds) if step_seconds else None,
        "epochs": throughput.epoch(),
        "epoch_seconds": throughput.epoch_seconds(step_seconds) if step_seconds else None,
        "hbm_peak_bytes": throughput.memory_bytes().get(PEAK),
        "wait_share": throughput.wait_share,
        "train_seconds": throughput.total_seconds,
        "program": step.hash,
        "compile_cached": step.cached,
        "mesh": str(program.derived.mesh),
        **({"slices": history} if (history := slice_history(read_events(folder.events))) else {}),
        "device": {
            "platform": chosen.platform,
            "kind": chosen.devices[0].device_kind,
            "chip": chip.name if chip else None,
            "count": len(chosen.devices),
        },
        "versions": {
            "forerun": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "jaxlib", "optax", "orbax-checkpoint")},
        },
    }


def slice_history(events: Iterable[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return from which step on how many slices computed the steps that the run keeps.

    The `step` of an entry is that of the checkpoint from which they continued, 0 for the start. Steps that a later
    session computed again count for that session. A session without a `resume` line did not get as far as its state,
    except for the first one, which has none. The result is empty for a run that does not count slices.
    """
    found: list[dict[str, int]] = []
    slices: Any = None
    for event in events:
        if event.get("event") == "start":
            slices = event.get("slices")
        first = event.get("event") == "start" and event.get("session") == 1
        if not (first or event.get("event") == "resume") or type(slices) is not int:
            continue
        step = 0 if first else int(event.get("step", 0))
        while found and found[-1]["step"] >= step:
            found.pop()
        if not found or found[-1]["slices"] != slices:
            found.append({"step": step, "slices": slices})
    return found


# ---- Detection of a finished run, before data is read or a program is compiled ----


def finished_summary(resolved: ResolvedJob, reporter: Reporter) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None if the run is not finished.

    All hosts call this together and get the same answer. The files of the newest checkpoint are verified: if they are
    damaged, the run is not finished, because it resumes from an older checkpoint. The data is not compared with the
    checkpoint's, because no step is trained on it.

    Args:
      resolved: the job. If its `steps` are not known before the data is read, the result is None.
      reporter: receives messages for the user.
    """
    job, folder = resolved.job, folder_of(resolved.job)
    where = folder.checkpoints(job)
    place = folder_at(where, RetrySchedule(), reporter)
    commits = place.with_retries(Log(place).commits) if job.steps is not None else []
    newest = commits[-1] if commits else None
    summary: dict[str, Any] | None = {}
    good = newest is not None and _is_end(resolved, newest, folder)
    if good and newest is not None and hosts.is_first():
        _restore(resolved, newest, folder, reporter)  # this machine may not have the run's folder
        summary = read_summary(folder, newest.step)  # None if the run was killed before it was written
    if good and newest is not None and summary is not None:
        good = place.with_retries(lambda: damage(place, newest.folder, newest.files, hosts.part())) is None
    if not hosts.true_on_all(good and summary is not None):
        return None
    assert newest is not None
    assert summary is not None
    if hosts.is_first():
        with tracking(job, folder.metrics, newest.step, reporter):
            pass  # send the rows that the trackers have not received yet
    first, final = (
        "unknown" if loss is None else f"{loss:.4f}" for loss in (summary.get("first_loss"), summary.get("final_loss"))
    )
    reporter.info(f"this run has finished at step {newest.step}, loss {first} -> {final}; nothing was read or compiled")
    if newest.step == job.steps:
        longer = f"set steps to more than {job.steps}"
    else:
        longer = f"raise validation.patience, which ended the run before step {job.steps}"
    reporter.info(f"the result is in {folder.path}, its checkpoints in {where}; to train longer, {longer}")
    return summary | {"resumed_at": newest.step}


def _is_end(resolved: ResolvedJob, newest: Commit, folder: RunFolder) -> bool:
    """Return whether the newest checkpoint is the end of this run: its last step, or early stopping."""
    record = newest.record
    before = recorded_job(record.get("job"), folder)
    if not is_same_run(_with_revisions_of(before, resolved), before):
        return False  # a later check raises an error that lists the differences
    require_steps_left(resolved, newest.step, folder.checkpoints(resolved.job))
    evaluated = record.get("looked", newest.step) >= newest.step
    return (newest.step == resolved.job.steps and evaluated) or _is_exhausted(resolved.job.validation.patience, record)


def _restore(resolved: ResolvedJob, newest: Commit, folder: RunFolder, reporter: Reporter) -> None:
    """Restore the run's files from the checkpoints, as far as they are missing in the run's folder."""
    restore_files(folder.checkpoints(resolved.job), folder, reporter)
    if not folder.job.exists():
        before = recorded_job(newest.record["job"], folder)
        atomic_write(folder.job, dump(_with_revisions_of(before, resolved)))
    copy_template(resolved.job, folder, begun=True)


def _is_exhausted(patience: int | None, record: Mapping[str, Any]) -> bool:
    """Return whether the validation loss has not fallen for `patience` evaluations before the checkpoint."""
    return patience is not None and record.get("validation", {}).get("looks_since", 0) >= patience


def _with_revisions_of(before: Job, resolved: ResolvedJob) -> Job:
    """Return the job with the revisions of the earlier process, if the user set none.

    A branch of the hub may have moved since the run finished. That is no reason to train again.
    """
    job, written = resolved.job, resolved.written or resolved.job
    if written.model.revision is None:
        job = job.model_copy(update={"model": job.model.model_copy(update={"revision": before.model.revision})})
    teacher, teacher_before = written.method.teacher, before.method.teacher
    if teacher is not None and teacher_before is not None and teacher.revision is None:
        job = job.with_teacher_revision(teacher_before.revision)
    return job
