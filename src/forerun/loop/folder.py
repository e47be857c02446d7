"""`runs/<name>/`: the resolved job, metrics, summary and checkpoints of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forerun.config.load import dump, load, values
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write, require_writable_folder

# What may change between a run and its resumption: where and how it is computed, and how long. Never the data, the
# model or the optimizer. A change of `steps` is reported and recorded (`forerun.loop.extension`).
MAY_CHANGE = (
    "device",
    "devices",
    "mesh",
    "log_every",
    "checkpoint",
    "validation",
    "sample",
    "track",
    "runs",
    "name",
    "data.path",
    "data.store",
    "data.workers",
    "data.feeders",
    "data.ledger",
    "guard.spike",
    "guard.skips",
    "guard.in_a_row",
    "guard.compare_every",
    "attention",
    "micro_batch",
    "remat",
    "loss_chunk",
    "steps",
)

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def skips(self) -> Path:
        return self.path / "skips.jsonl"

    @property
    def tracked(self) -> Path:
        return self.path / "tracked.json"

    @property
    def chat_template(self) -> Path:
        return self.path / "chat_template.jinja"

    @property
    def reference(self) -> Path:
        return self.path / "reference.json"

    def checkpoints(self, job: Job) -> Path | str:
        """In the folder, or where its job says, in a folder of the run's name."""
        if job.checkpoint.folder is None:
            return self.path / CHECKPOINTS
        return f"{job.checkpoint.folder.rstrip('/')}/{job.name}"


def folder_of(job: Job) -> RunFolder:
    return RunFolder(Path(job.runs) / job.name)


def require_usable(job: Job) -> None:
    """Raise if the run's folder or its checkpoints cannot be written, before anything is read or compiled."""
    folder = folder_of(job)
    require_writable_folder(folder.path, "runs")
    checkpoints = folder.checkpoints(job)
    if isinstance(checkpoints, str) and "://" not in checkpoints:
        require_writable_folder(Path(checkpoints), "checkpoint.folder")


def set_aside(job: Job) -> None:
    """A run of the same name that is there already keeps everything, under another name."""
    folder = folder_of(job)
    checkpoints = folder.checkpoints(job)
    if isinstance(checkpoints, str) and _has_records(checkpoints):
        raise UserError(
            f"--fresh cannot set the checkpoints in {checkpoints} aside",
            why="they lie outside of the run's folder (checkpoint.folder), and a new run would go on from them",
            fix="give this run another name (name=...), or move them away first",
        )
    if folder.path.exists():
        folder.path.rename(_free_name(folder.path))


def open_folder(
    job: Job, *, fresh: bool, writes: bool = True, tell: Callable[[str], None] = lambda text: None
) -> RunFolder:
    """Return the run's folder, new or to be resumed. The same name with another job is refused.

    The newest checkpoint's record has the job that the run began with, and is verified. `job.yaml` is compared only
    where no checkpoint has the job, and is written again in every case. Metrics, ledger and summary that are stored
    with the checkpoints are restored.

    Args:
      writes: whether this host writes the folder; one host does it for all.
      tell: gets a line if `job.yaml` was missing, damaged or changed.
    """
    from forerun.loop.stored_files import restore_files

    folder = folder_of(job)
    if not writes:
        return folder
    if fresh:
        set_aside(job)
    record = newest_record(folder.checkpoints(job), tell)
    if record is not None and "job" in record:
        before = _recorded_job(record["job"], folder)
        _require_same(job, before, folder)
        if trouble := _trouble(folder.job, before):
            tell(f"{folder.job} {trouble}; it is restored, and the job is the one that the checkpoint recorded")
    elif not _is_blank(folder.job):
        _require_same(job, load(folder.job).job, folder)
    elif record is not None:
        tell(f"{folder.job} is missing or empty, and the checkpoints do not have the job: it is not compared")
    elif folder.job.exists():
        tell(f"{folder.job} was empty; it is written again")
    folder.path.mkdir(parents=True, exist_ok=True)
    atomic_write(folder.job, dump(job))
    keep_template(job, folder, begun=record is not None)
    restore_files(folder.checkpoints(job), folder, tell)
    return folder


def keep_template(job: Job, folder: RunFolder, *, begun: bool) -> None:
    """Write the job's chat template to the run's folder: the model is asked with it after the job's file is gone.

    Once a checkpoint exists, the template that the run began with stays.
    """
    from forerun.data.chat_template import job_template

    if begun and folder.chat_template.exists():
        return
    template = job_template(job.data)
    if template is not None:
        atomic_write(folder.chat_template, template)


def job_of_run(folder: RunFolder, tell: Callable[[str], None] = lambda text: None) -> Job | None:
    """Return the job of a run that has begun, or None if the folder is not a run's.

    The newest checkpoint's record is verified, so it has priority: a `job.yaml` that is missing, damaged or changed is
    reported to `tell`, and the recorded job is returned.
    """
    written, damage = None, None
    try:
        written = None if _is_blank(folder.job) else load(folder.job).job
    except UserError as error:
        damage = error
    # Without a `job.yaml` that can be read, only the default place of the checkpoints is known.
    record = newest_record(folder.checkpoints(written) if written else folder.path / CHECKPOINTS, tell)
    if record is None or "job" not in record:
        if damage is not None:
            raise damage
        return written
    recorded = _recorded_job(record["job"], folder)
    if trouble := _trouble(folder.job, recorded):
        tell(f"{folder.job} {trouble}; the job is the one that the checkpoint recorded")
        return recorded
    return written


def newest_record(checkpoints: Path | str, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any] | None:
    """Return the record of the newest checkpoint, or None if there is no checkpoint."""
    from forerun.checkpoint.log import Log
    from forerun.checkpoint.patience import Patience
    from forerun.checkpoint.place import place_of

    place = place_of(checkpoints, Patience(), tell)
    commits = place.patiently(Log(place).commits)
    return dict(commits[-1].record) if commits else None


def _recorded_job(content: Any, folder: RunFolder) -> Job:
    try:
        return Job.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{folder.path} has a checkpoint whose job this version of forerun cannot read",
            why=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            fix="resume with the version that saved it, or start over with --fresh (the old folder is kept, renamed)",
        ) from None


def _trouble(file: Path, before: Job) -> str | None:
    """Return what is wrong with a `job.yaml`, given the job that the checkpoint recorded."""
    if not file.exists():
        return "is missing"
    try:
        return "was changed" if _differing(load(file).job, before) else None
    except UserError:
        return "is damaged"


def _is_blank(file: Path) -> bool:
    """Return whether a file is missing or has no text: a power loss can leave it empty, or full of zero bytes."""
    return not file.exists() or not file.read_bytes().strip(b"\0 \r\n\t")


def _differing(job: Job, before: Job) -> list[str]:
    """Return the keys of values that may not change between a run and its resumption, and did."""
    old, new = values(before), values(job)
    return [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE)]


def is_same_run(job: Job, before: Job) -> bool:
    """Return whether a concrete job may resume the run of `before`."""
    return not _differing(job, before)


def _require_same(job: Job, before: Job, folder: RunFolder) -> None:
    if changed := _differing(job, before):
        old, new = values(before), values(job)
        listed = "\n".join(f"{key}: {old.get(key)} there, {new.get(key)} here" for key in changed)
        raise UserError(
            f"{folder.path} belongs to another job",
            why=f"it would be resumed with other values:\n{listed}",
            fix="give this job another name (name=...), or start over with --fresh (the old folder is kept, renamed)",
        )


def _has_records(checkpoints: str) -> bool:
    from forerun.checkpoint.log import Log
    from forerun.checkpoint.place import place_of

    return bool(Log(place_of(checkpoints)).records())


def _free_name(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return other
