"""A sweep from its command line to its report: `prepare` checks it, `train` runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.config.load import values
from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.reporter import Reporter
from forerun.units import Seconds
from forerun.verbs.sweep.grid import SweepGrid, SweepRun, folder_of_sweep, read_grid, runs_of
from forerun.verbs.sweep.runner import DeviceShare, SweepRunner, device_shares, host_devices
from forerun.verbs.sweep.sweep_file import SweepFile, SweepResults, results_of

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
