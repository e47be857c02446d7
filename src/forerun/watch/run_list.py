"""The runs of a folder, with their state and their newest values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UserError
from forerun.report.run_files import read_object
from forerun.report.run_record import RunRecord, read_run
from forerun.report.run_status import status_of
from forerun.run_folder.stage_folder import STAGES
from forerun.storage.address import Address

BROKEN = "broken"


@dataclass(frozen=True)
class RunEntry:
    """One run of a folder.

    Attributes:
      name: the name of the run's folder.
      location: the folder, or the address of the run's checkpoints in a bucket.
      stages: the name of the job file with stages that the run belongs to, or "".
      state: `running`, `waiting`, `silent`, `stopped`, `finished`, or `broken` for a folder that cannot be read.
      detail: the phase, the reason of a stop, or the reason why the folder cannot be read.
      step: the last step that is recorded.
      steps: the number of steps of the job, or None if it is unknown.
      loss: the newest loss, or None.
      validation: the newest validation loss, or None.
      age_seconds: the time since the last news of the run, or None.
    """

    name: str
    location: str
    stages: str = ""
    state: str = BROKEN
    detail: str = ""
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    validation: float | None = None
    age_seconds: float | None = None


def list_runs(folder: str | Path = "runs", now: float | None = None) -> tuple[RunEntry, ...]:
    """Return the runs of a folder, those with the newest news first.

    A run that cannot be read is listed with the reason. Folders that are not runs are omitted.

    Args:
      folder: the folder of runs, or the `checkpoint.folder` of runs in a bucket, such as `gs://bucket/checkpoints`.
      now: the Unix time, by default that of the clock.

    Raises:
      UserError: the folder does not exist.
    """
    now = time.time() if now is None else now
    remote = Address.of(folder).is_remote
    entries = _bucket_entries(str(folder), now) if remote else _folder_entries(Path(folder), now)
    return tuple(sorted(entries, key=lambda entry: (entry.age_seconds is None, entry.age_seconds or 0.0, entry.name)))


def _folder_entries(folder: Path, now: float) -> Iterator[RunEntry]:
    if not folder.is_dir():
        raise UserError(
            "E-WATCH-001",
            f"{folder} is not a folder of runs",
            why="it is a file" if folder.exists() else "it does not exist",
            fix="give the folder that contains the runs (the key `runs` of their jobs), or train a job first",
        )
    paths = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    stages = {run: path.name for path in paths for run in _stage_runs(path)}
    for path in paths:
        if any((path / name).exists() for name in ("job.yaml", "metrics.jsonl", "checkpoints")):
            yield _entry(path.name, str(path), stages.get(path.name, ""), path, now)


def _stage_runs(path: Path) -> list[str]:
    """Return the names of the runs of a job file with stages, or an empty list for any other folder."""
    found = read_object(path / STAGES).get("stages")
    return [str(run) for run in found.values()] if isinstance(found, dict) else []


def _bucket_entries(address: str, now: float) -> Iterator[RunEntry]:
    from forerun.storage.open_folder import folder_at
    from forerun.storage.retries import RetrySchedule

    folder = folder_at(address, RetrySchedule())
    for name in folder.with_retries(folder.names):
        yield _entry(name, folder.inside(name).address, "", None, now)


def _entry(name: str, location: str, stages: str, run: Path | None, now: float) -> RunEntry:
    try:
        record = read_run(location)
    except UserError as error:
        return RunEntry(name, location, stages, detail=f"{error.what} [{error.code}]")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return RunEntry(name, location, stages, detail=f"{type(error).__name__}: {error}")
    return entry_of_record(record, name, stages, run, now)


def entry_of_record(record: RunRecord, name: str, stages: str, run: Path | None, now: float) -> RunEntry:
    """Return the entry of a run that was read."""
    status = status_of(record, run, now)
    return RunEntry(
        name=name,
        location=record.location,
        stages=stages,
        state=str(status.state),
        detail=status.detail,
        step=record.step,
        steps=record.job.steps,
        loss=record.newest("loss"),
        validation=record.newest("validation_loss"),
        age_seconds=status.age_seconds,
    )
