"""`sweep.json`: the definition of a sweep and the state of its runs, so that the same command continues it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forerun.config.load import values
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.run_folder.run_folder import MAY_CHANGE, RunFolder
from forerun.verbs.sweep.grid import SweepGrid, SweepRun, value_text

FILE = "sweep.json"
VERSION = 1
OWN_KEYS = ("name", "runs")

RunState = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class RunRecord:
    """The state of a run.

    `seconds` is the time of all its processes together. `job` is the digest of the job that these processes trained.
    """

    state: RunState = "waiting"
    seconds: float = 0.0
    exit_code: int | None = None
    job: str = ""
    error: str = ""


class SweepFile:
    """The file `sweep.json` in the folder of a sweep. Each change is written immediately and atomically.

    Args:
      folder: the folder of the sweep.
      base: the job that all runs share.
    """

    def __init__(self, folder: Path, base: Job, grid: SweepGrid, runs: Sequence[SweepRun]) -> None:
        self.path = folder / FILE
        self._runs = {run.name: run for run in runs}
        axes = {axis.key: [value_text(value) for value in axis.values] for axis in grid.axes}
        skipped = (*OWN_KEYS, *axes)
        self._definition: dict[str, Any] = {
            "axes": axes,
            "job": {key: str(value) for key, value in values(base).items() if not _is_below(key, skipped)},
        }
        found = _read(self.path)
        self._before: dict[str, Any] | None = found and {"axes": found["axes"], "job": found["job"]}
        self.records = {name: RunRecord(**record) for name, record in (found or {}).get("runs", {}).items()}

    def changes(self) -> list[str]:
        """Return what changed since an earlier process defined this sweep, as lines for the user.

        Raises:
          UserError: a change makes the earlier runs incomparable, for example another model.
        """
        if self._before is None or self._before == self._definition:
            return []
        lines = []
        before, now = self._before["job"], self._definition["job"]
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        # A key that became an axis, or is no longer one, is compared for each run by `train` itself.
        changed = [key for key in changed if not _is_below(key, (*self._before["axes"], *self._definition["axes"]))]
        shown = [f"{key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}" for key in changed]
        if fatal := [line for key, line in zip(changed, shown, strict=True) if not _is_below(key, MAY_CHANGE)]:
            raise UserError(
                "E-RUN-080",
                f"the job of this sweep changed: {self.path}",
                why="\n".join([*fatal, "its earlier runs could not be compared with new ones"]),
                fix="undo the change, or give the new sweep another name (name=...)",
            )
        lines += [f"the job changed: {line}" for line in shown]
        for key in dict.fromkeys((*self._before["axes"], *self._definition["axes"])):
            old, new = self._before["axes"].get(key), self._definition["axes"].get(key)
            if old != new:
                lines.append(f"the values changed: {key}={_values(old)} -> {_values(new)}")
        if gone := [name for name in self.records if name not in self._runs]:
            lines.append(f"{len(gone)} earlier runs are not part of the sweep any more; their folders are kept")
        return lines

    def record(self, run: SweepRun) -> RunRecord:
        """Return the record of a run, which is new if the sweep has not started it yet."""
        return self.records.get(run.name, RunRecord())

    def is_finished(self, run: SweepRun) -> bool:
        """Return whether an earlier process finished this run with the same job."""
        record = self.record(run)
        folder = RunFolder(self.path.parent / run.name)
        return record.state == "finished" and record.job == job_digest(run.job) and folder.summary.is_file()

    def update(self, run: SweepRun, **changes: Any) -> RunRecord:
        """Change the record of a run, and write the file."""
        self.records[run.name] = record = replace(self.record(run), **changes)
        self.write()
        return record

    def write(self) -> None:
        """Write the file."""
        content = {
            "version": VERSION,
            **self._definition,
            "runs": {name: asdict(record) for name, record in self.records.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path, json.dumps(content, indent=2) + "\n")


def job_digest(job: Job) -> str:
    """Return a digest of all values of a job."""
    text = json.dumps({key: str(value) for key, value in values(job).items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    """Return the content of the file, or None if it does not exist."""
    try:
        content = json.loads(path.read_text("utf-8"))
        valid = content["version"] == VERSION and all(isinstance(content[key], dict) for key in ("axes", "job", "runs"))
        for record in content["runs"].values():
            RunRecord(**record)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise UserError(
            "E-RUN-081",
            f"{path} cannot be read",
            why="it is damaged, or another version of forerun wrote it",
            fix="remove the file: the runs stay, and the same command continues them",
        )
    return dict(content)


def _is_below(key: str, names: Sequence[str]) -> bool:
    """Return whether `key` is one of `names` or a key in one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _values(texts: Sequence[str] | None) -> str:
    return "one value" if texts is None else ",".join(texts)
