"""The file of a sweep, `sweep.json`, and the results of its runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from forerun.config.load import values
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.run_folder.run_folder import MAY_CHANGE, RunFolder
from forerun.track.metrics import read_metrics
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


# ---- Results ----


VALIDATION, LOSS = "validation loss", "loss"

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class RunResult:
    """The result of a run. Values that are not known yet are None.

    Attributes:
      values: the swept values by key.
      state: waiting, running, finished, failed or stopped.
      loss: the loss of the last logged step.
      validation_loss: the lowest validation loss.
      tokens: tokens of all steps so far.
      seconds: wall time of all processes of the run.
      program: the hash of its compiled step.
      compile_cached: whether its newest process found the program in the compile cache.
    """

    name: str
    values: Mapping[str, Any]
    label: str
    state: str
    folder: Path
    steps: int
    loss: float | None
    validation_loss: float | None
    tokens: int | None
    seconds: float
    program: str | None
    compile_cached: bool | None
    error: str
    curve: Curve = field(repr=False, default_factory=list)
    validation_curve: Curve = field(repr=False, default_factory=list)


@dataclass(frozen=True)
class SweepResults:
    """The results of all runs, the best first, and the name of the metric that orders them."""

    metric: str
    runs: tuple[RunResult, ...]

    def value(self, run: RunResult) -> float | None:
        """Return the metric of a run. None if the run has not finished or has no such value."""
        value = run.validation_loss if self.metric == VALIDATION else run.loss
        return value if run.state == "finished" else None

    @property
    def best(self) -> RunResult | None:
        """The finished run with the lowest metric, or None."""
        first = self.runs[0] if self.runs else None
        return first if first is not None and self.value(first) is not None else None

    def of_state(self, state: str) -> list[RunResult]:
        """Return the runs in this state."""
        return [run for run in self.runs if run.state == state]

    @property
    def programs(self) -> set[str]:
        """The hashes of the compiled steps of all runs."""
        return {run.program for run in self.runs if run.program}


def results_of(file: SweepFile, runs: Sequence[SweepRun]) -> SweepResults:
    """Return the results of all runs, from their folders and the file of the sweep.

    The metric is the validation loss if all finished runs have one, else the loss of the last step.
    """
    found = [_result(file, run) for run in runs]
    finished = [run for run in found if run.state == "finished"]
    metric = VALIDATION if finished and all(run.validation_loss is not None for run in finished) else LOSS
    unordered = SweepResults(metric, tuple(found))

    def rank(run: RunResult) -> float:
        value = unordered.value(run)
        return math.inf if value is None else value

    return SweepResults(metric, tuple(sorted(found, key=rank)))


def _result(file: SweepFile, run: SweepRun) -> RunResult:
    folder, record = RunFolder(file.path.parent / run.name), file.record(run)
    rows = read_metrics(folder.metrics)
    curve = _curve(rows, "loss")
    validation = _curve(rows, "validation_loss")
    summary: dict[str, Any] = {}
    if folder.summary.is_file():
        summary = json.loads(folder.summary.read_text("utf-8"))
    steps = int(summary.get("steps") or (rows[-1]["step"] if rows else 0))
    return RunResult(
        name=run.name,
        values=run.values,
        label=run.label,
        state=record.state,
        folder=folder.path,
        steps=steps,
        loss=summary.get("final_loss", curve[-1][1] if curve else None),
        validation_loss=min((loss for _, loss in validation), default=None),
        tokens=steps * run.job.batch * run.job.sequence if steps else None,
        seconds=record.seconds,
        program=summary.get("program"),
        compile_cached=summary.get("compile_cached"),
        error=record.error,
        curve=curve,
        validation_curve=validation,
    )


def _curve(rows: Sequence[Mapping[str, Any]], key: str) -> Curve:
    return [(row["step"], row[key]) for row in rows if isinstance(row.get(key), float)]
