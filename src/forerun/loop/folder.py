"""`runs/<name>/`: the resolved job, metrics, summary and checkpoints of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.config.load import dump, load, values
from forerun.config.schema import Job
from forerun.errors import UserError

# What may change between a run and its resumption: where and how it is computed, never what.
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
)


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

    def checkpoints(self, job: Job) -> Path | str:
        """In the folder, or where its job says, in a folder of the run's name."""
        if job.checkpoint.folder is None:
            return self.path / "checkpoints"
        return f"{job.checkpoint.folder.rstrip('/')}/{job.name}"


def folder_of(job: Job) -> RunFolder:
    return RunFolder(Path(job.runs) / job.name)


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


def open_folder(job: Job, *, fresh: bool, writes: bool = True) -> RunFolder:
    """The run's folder, new or to be resumed. The same name with another job is refused; one host `writes` for all."""
    folder = folder_of(job)
    if not writes:
        return folder
    if fresh:
        set_aside(job)
    if folder.job.exists():
        _require_same(job, load(folder.job).job, folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    part = folder.job.with_name("job.yaml.part")  # a kill in the middle of writing must not leave half a job
    part.write_text(dump(job))
    part.replace(folder.job)
    return folder


def _require_same(job: Job, before: Job, folder: RunFolder) -> None:
    old, new = values(before), values(job)
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE)]
    if changed:
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
