"""A sweep: its runs, its file `sweep.json`, and the training of its unfinished runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forerun.config.load import values
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.files import atomic_write
from forerun.reporter import Reporter
from forerun.run_folder.run_folder import MAY_CHANGE, RunFolder
from forerun.units import Seconds
from forerun.verbs.sweep.grid import SweepGrid, SweepRun, folder_of_sweep, read_grid, runs_of, value_text
from forerun.verbs.sweep.report import SweepResults, results_of
from forerun.verbs.sweep.runner import DeviceShare, SweepRunner, device_shares, host_devices

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


# Keys that do not change the compiled step, besides the arguments of the program (`forerun.program.schedule`).
OUTSIDE_THE_STEP = (
    *("name", "runs", "track", "checkpoint", "log_every", "sample", "validation", "epochs"),
    *("guard.skips", "guard.in_a_row", "guard.compare_every"),
)


@dataclass(frozen=True)
class PreparedSweep:
    """A checked sweep.

    Attributes:
      path: the job file.
      base: the job that all runs share.
      runs: all runs, in the order in which they are trained.
      file: the state of the sweep on the disk.
      shares: the devices of the processes.
      changes: what changed since an earlier process defined the sweep, as lines for the user.
    """

    path: Path
    base: Job
    grid: SweepGrid
    runs: tuple[SweepRun, ...]
    file: SweepFile
    shares: tuple[DeviceShare, ...]
    changes: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The folder of the sweep."""
        return self.file.path.parent

    @property
    def unfinished(self) -> list[SweepRun]:
        """The runs that are still to be trained or resumed."""
        return [run for run in self.runs if not self.file.is_finished(run)]

    def compilations(self) -> int:
        """Return the number of different programs of all runs, as far as the job determines them.

        Runs that differ only in numbers such as the learning rate share one program.
        """
        return len({_program_key(run.job) for run in self.runs})

    def estimated_seconds(self) -> float | None:
        """Return the remaining wall time from the mean time of finished runs, or None before the first one."""
        times = [self.file.record(run).seconds for run in self.runs if self.file.is_finished(run)]
        if not times:
            return None
        rounds = -(-len(self.unfinished) // len(self.shares))
        return rounds * sum(times) / len(times)

    def results(self) -> SweepResults:
        """Return the results of all runs, also of unfinished ones."""
        return results_of(self.file, self.runs)

    def description(self) -> list[str]:
        """Return lines about the sweep before it starts: number of runs, time and compilations."""
        axes = " x ".join(f"{len(axis.texts)} {axis.key}" for axis in self.grid.axes)
        left, seconds, programs = len(self.unfinished), self.estimated_seconds(), self.compilations()
        parallel = len(self.shares)
        lines = [f"sweep: {len(self.runs)} runs ({axes}) in {self.folder}"]
        if left < len(self.runs):
            lines.append(f"{len(self.runs) - left} are finished, {left} are to be trained")
        if left:
            time_text = "known after the first run" if seconds is None else f"about {Seconds(seconds)}"
            lines.append(f"{_counted(parallel, 'run')} at a time, estimated time: {time_text}")
            more = f"; the first {parallel} runs may compile it at the same time" if parallel > 1 else ""
            lines.append(f"{_counted(programs, 'compilation')} expected, other runs use the compile cache{more}")
        return lines


def prepare(path: str | Path, words: Sequence[str], *, parallel: int = 1) -> PreparedSweep:
    """Check a sweep and all its runs, before anything is trained.

    Args:
      path: the job file.
      words: overrides of the job. Those with several values, such as `seed=0,1`, are the axes of the sweep.
      parallel: runs at a time, each on its own devices.

    Raises:
      UserError: a run is not a valid job, the devices cannot be divided, or the sweep changed too much.
    """
    path = Path(path)
    grid = read_grid(words)
    base, runs = runs_of(path, grid)
    _require_names(runs)
    shares = device_shares(host_devices(base.job), parallel) if parallel > 1 else [DeviceShare()]
    file = SweepFile(folder_of_sweep(base.job), base.job, grid, runs)
    return PreparedSweep(path, base.job, grid, tuple(runs), file, tuple(shares), tuple(file.changes()))


def train(
    sweep: PreparedSweep,
    reporter: Reporter,
    *,
    stop_on_failure: bool = False,
    on_runner: Callable[[SweepRunner], None] = lambda runner: None,
) -> SweepResults:
    """Train the unfinished runs of a sweep, and return the results of all runs.

    Args:
      sweep: the prepared sweep.
      reporter: receives lines for the user.
      stop_on_failure: whether a failed run ends the sweep.
      on_runner: receives the runner, whose `stop` ends the sweep early.
    """
    runner = SweepRunner(sweep.path, sweep.file, sweep.shares, reporter, stop_on_failure=stop_on_failure)
    on_runner(runner)
    sweep.file.write()
    began, unfinished = time.monotonic(), sweep.unfinished
    runner.run(unfinished, len(sweep.runs))
    if unfinished:
        reporter.info(f"the sweep took {Seconds(time.monotonic() - began)}")
    return sweep.results()


def require_success(results: SweepResults, folder: Path) -> None:
    """Raise if runs failed."""
    failed = results.of_state("failed")
    if failed:
        raise UserError(
            "E-RUN-082",
            f"{len(failed)} of {len(results.runs)} runs of the sweep failed",
            why="\n".join(f"{run.label}: {run.error or 'no message'}" for run in failed),
            fix=f"see {folder / 'logs'}; the same command tries these runs again",
        )


def _require_names(runs: Sequence[SweepRun]) -> None:
    names = [run.name for run in runs]
    assert len(set(names)) == len(names), "values of an axis differ, so names do"


def _program_key(job: Job) -> tuple[tuple[str, str], ...]:
    """Return the values of a job that determine its compiled step."""
    from forerun.program.schedule import ARGUMENTS

    known = values(job)
    # The seed of dropout is part of the program. The data is not, except for the size of its vocabulary.
    data = [key for key in known if key.startswith("data.") and key != "data.tokenizer"]
    outside = (*OUTSIDE_THE_STEP, *ARGUMENTS, *data, *(() if known.get("lora.dropout") else ("seed",)))
    return tuple(
        (key, str(value))
        for key, value in known.items()
        if not any(key == name or key.startswith(f"{name}.") for name in outside)
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
