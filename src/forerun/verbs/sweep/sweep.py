"""`sweep`: train a job with all combinations of some values, and compare the results."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forerun.files import atomic_write
from forerun.reporter import LineReporter
from forerun.verbs.job_files import open_job, prepared
from forerun.verbs.option_types import Count, Value
from forerun.verbs.table import Table
from forerun.verbs.train import Run, open_run

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.verbs.sweep.run_sweep import PreparedSweep
    from forerun.verbs.sweep.sweep_file import SweepResults


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep. A notebook shows them as the page of the sweep.

    Attributes:
      folder: the folder of the sweep, with its runs, `sweep.json`, `sweep.md` and `sweep.html`.
      metric: the metric that orders the runs: validation loss or loss.
    """

    folder: Path
    metric: str
    _sweep: PreparedSweep = field(repr=False)
    _results: SweepResults = field(repr=False)

    @property
    def table(self) -> Table:
        """The runs as a table, the best first: swept values, losses, tokens, seconds, state and folder."""
        return Table(
            {
                **run.values,
                "loss": run.loss,
                "validation_loss": run.validation_loss,
                "tokens": run.tokens,
                "seconds": run.seconds,
                "state": run.state,
                "folder": str(run.folder),
            }
            for run in self._results.runs
        )

    @property
    def best(self) -> Run | None:
        """The finished run with the lowest metric, or None if no run has finished."""
        return None if self._results.best is None else open_run(self._results.best.folder)

    @property
    def failed(self) -> dict[str, str]:
        """The error of each failed run, by its values."""
        return {run.label: run.error for run in self._results.of_state("failed")}

    def __str__(self) -> str:
        from forerun.verbs.sweep.report import cells_of, columns_of

        heads = columns_of(self._results)
        return str(Table(dict(zip(heads, cells_of(self._results, run), strict=True)) for run in self._results.runs))

    def _repr_html_(self) -> str:
        from forerun.pages.render import render
        from forerun.verbs.sweep.report import page

        content = page(self._sweep, self._results)
        return render("sweep_frame.html.jinja", name=self._sweep.base.name, content=content)


def sweep(
    job: Job | str | os.PathLike[str],
    *values: Annotated[str, Value("KEY=V1,V2")],
    parallel: Count = 1,
    stop_on_failure: bool = False,
) -> Sweep:
    """Train a job with all combinations of values, and compare the results.

    ```python
    result = fr.sweep("job.yaml", "optimizer.lr=1e-5,3e-5,1e-4", "seed=0,1")
    print(result.best.folder)
    ```

    Each run is a separate process, with a folder in the folder of the sweep. The same call skips finished runs and
    resumes interrupted ones. A failed run does not stop the others: see `Sweep.failed`.

    Args:
      job: the path of a job file, or a job; for a job with a custom class, give the path
      *values: a key with several values, such as seed=0,1, is swept; one with a single value is the same for all runs
      parallel: train N runs at a time, each on its own devices
      stop_on_failure: end the sweep when a run fails

    Returns:
      The results of all runs.

    Raises:
      UserError: a run is not a valid job, the devices cannot be divided, or the sweep has changed.
    """
    from forerun.verbs.sweep.report import write_report
    from forerun.verbs.sweep.run_sweep import prepare
    from forerun.verbs.sweep.run_sweep import train as train_sweep

    made = prepare(_path_of(job), values, parallel=parallel)
    for line in (*made.description(), *made.changes):
        print(line)
    results = train_sweep(made, LineReporter(sys.stdout), stop_on_failure=stop_on_failure)
    write_report(made, results)
    return Sweep(made.folder, results.metric, made, results)


def _path_of(job: Job | str | os.PathLike[str]) -> Path:
    """Return the file that the processes of the sweep read. A job from Python is written next to its runs."""
    from forerun.config.load import dump
    from forerun.config.schema import Job

    if not isinstance(job, Job):
        return open_job(job).path
    from forerun.verbs.sweep.grid import folder_of_sweep

    complete = prepared(job)
    path = folder_of_sweep(complete) / "job.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, dump(complete))
    return path
