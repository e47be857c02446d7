"""`runs/<name>/`: the resolved job, metrics, summary and checkpoints of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forerun.config.load import load, values
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write, require_writable_folder
from forerun.reporter import SILENT, Reporter
from forerun.storage.address import Address

# Keys that may change when a run is resumed: where and how it is computed, and how long. The data, the model and the
# optimizer may not change. A change of `steps` is reported and recorded (`forerun.run.extension`).
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
    "data.cache_gib",
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
    "unroll",
    "steps",
)

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run and the paths of its files."""

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
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tracked(self) -> Path:
        return self.path / "tracked.json"

    @property
    def program(self) -> Path:
        return self.path / "program.json"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def chat_template(self) -> Path:
        return self.path / "chat_template.jinja"

    @property
    def reference(self) -> Path:
        return self.path / "reference.json"

    def checkpoints(self, job: Job) -> Path | str:
        """Return where the checkpoints are: a path in the run's folder, or an address below `checkpoint.folder`."""
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
    if isinstance(checkpoints, str) and not Address.of(checkpoints).is_remote:
        require_writable_folder(Path(checkpoints), "checkpoint.folder")


def rename_existing_run(job: Job) -> None:
    """Rename the folder of an existing run with the job's name. Nothing is deleted.

    Raises:
      UserError: the run has checkpoints outside of its folder, which cannot be renamed with it.
    """
    folder = folder_of(job)
    checkpoints = folder.checkpoints(job)
    from forerun.checkpoint.log import Log
    from forerun.storage.open_folder import folder_at

    if isinstance(checkpoints, str) and Log(folder_at(checkpoints)).records():
        raise UserError(
            "E-RUN-025",
            f"--fresh cannot rename the checkpoints in {checkpoints}",
            why="they are outside of the run's folder (checkpoint.folder), and a new run would resume from them",
            fix="give this run another name (name=...), or move them first",
        )
    if folder.path.exists():
        folder.path.rename(free_name(folder.path, "old"))


def copy_template(job: Job, folder: RunFolder, *, begun: bool) -> None:
    """Copy the job's chat template to the run's folder, so that it is available without the original file.

    If the run has a checkpoint (`begun`), an existing copy is not replaced.
    """
    from forerun.data.chat_template import job_template

    if begun and folder.chat_template.exists():
        return
    template = job_template(job.data)
    if template is not None:
        atomic_write(folder.chat_template, template)


def job_of_run(folder: RunFolder, reporter: Reporter = SILENT) -> Job | None:
    """Return the job of a run that was started, or None if the folder is not a run's.

    The record of the newest checkpoint is verified, so it has priority. If `job.yaml` is missing, damaged or changed,
    `reporter` receives a message, and the recorded job is returned.
    """
    written, damage = None, None
    try:
        written = None if is_blank(folder.job) else load(folder.job).job
    except UserError as error:
        damage = error
    # If `job.yaml` cannot be read, only the default place of the checkpoints is known.
    record = newest_record(folder.checkpoints(written) if written else folder.path / CHECKPOINTS, reporter)
    if record is None:
        if damage is not None:
            raise damage
        return written
    recorded = recorded_job(record.get("job"), folder)
    if trouble := job_file_problem(folder.job, recorded):
        reporter.warn(f"{folder.job} {trouble}; the job is the one that the checkpoint recorded")
        return recorded
    return written


def require_run(folder: RunFolder, reporter: Reporter = SILENT) -> Job:
    """Return the job of a run. See `job_of_run`.

    Raises:
      UserError: The folder is not a run.
    """
    job = job_of_run(folder, reporter)
    if job is None:
        raise UserError(
            "E-RUN-020",
            f"{folder.path} is no run",
            why=f"there is no {folder.job}",
            fix="give the folder of a run, for example runs/quickstart",
        )
    return job


def newest_record(checkpoints: Path | str, reporter: Reporter = SILENT) -> dict[str, Any] | None:
    """Return the record of the newest checkpoint, or None if there is no checkpoint."""
    from forerun.checkpoint.log import Log
    from forerun.storage.open_folder import folder_at
    from forerun.storage.retries import RetrySchedule

    place = folder_at(checkpoints, RetrySchedule(), reporter)
    commits = place.with_retries(Log(place).commits)
    return dict(commits[-1].record) if commits else None


def recorded_job(content: Any, folder: RunFolder) -> Job:
    """Return the job in a checkpoint's record. Raise if this version cannot read it."""
    try:
        return Job.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            "E-RUN-026",
            f"{folder.path} has a checkpoint whose job this version of forerun cannot read",
            why=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            fix="resume with the version that saved it, or start over with --fresh (the old folder is kept, renamed)",
        ) from None


def job_file_problem(file: Path, before: Job) -> str | None:
    """Return what is wrong with a `job.yaml`, or None if it agrees with the job that the checkpoint recorded."""
    if not file.exists():
        return "is missing"
    try:
        return "was changed" if _differing(load(file).job, before) else None
    except UserError:
        return "is damaged"


def is_blank(file: Path) -> bool:
    """Return whether a file is missing or has no text. After a power loss, it can be empty or contain zero bytes."""
    return not file.exists() or not file.read_bytes().strip(b"\0 \r\n\t")


def _differing(job: Job, before: Job) -> list[str]:
    """Return the keys that differ although they may not change when a run is resumed."""
    old, new = values(before), values(job)
    return [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE)]


def is_same_run(job: Job, before: Job) -> bool:
    """Return whether a resolved job may resume the run of `before`."""
    return not _differing(job, before)


def require_same_job(job: Job, before: Job, folder: RunFolder) -> None:
    """Raise if a resolved job may not resume the run of `before`. The error lists the values that differ."""
    if changed := _differing(job, before):
        old, new = values(before), values(job)
        listed = "\n".join(f"{key}: {old.get(key)} there, {new.get(key)} here" for key in changed)
        raise UserError(
            "E-RUN-027",
            f"{folder.path} belongs to another job",
            why=f"it would be resumed with other values:\n{listed}",
            fix="give this job another name (name=...), or start over with --fresh (the old folder is kept, renamed)",
        )


def free_name(path: Path, word: str) -> Path:
    """Return a path beside `path` that does not exist, such as `name.old-1` for the word `old`."""
    number = 1
    while (other := path.with_name(f"{path.name}.{word}-{number}")).exists():
        number += 1
    return other
