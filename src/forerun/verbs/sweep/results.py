"""Results of a sweep: what each run has reached, ordered by the metric that compares the runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.run_folder.run_folder import RunFolder
from forerun.track.metrics import read_metrics
from forerun.verbs.sweep.grid import SweepRun
from forerun.verbs.sweep.sweep_file import SweepFile

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
