"""`train`: run a job to its end in this process. `Run`: the folder of a run with its metrics and its model."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.reporter import LineReporter, Reporter
from forerun.verbs.job_files import prepared
from forerun.verbs.option_types import Value
from forerun.verbs.table import Table

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.verbs.export.result import Export
    from forerun.verbs.language_model import LanguageModel


@dataclass(frozen=True)
class Run:
    """The folder of a run. A notebook shows its loss curve.

    Attributes:
      folder: the folder, such as `runs/quickstart`.
      job: the job of the run.
      finished: whether this process, or one before it, ran the last step.
      sample: the text that the model generated at the end, if this process finished the run.
    """

    folder: Path
    job: Job = field(repr=False)
    finished: bool
    sample: str = field(default="", repr=False)

    @property
    def metrics(self) -> Table:
        """The logged steps as a table: step, loss, lr, grad_norm, tokens_per_second and others."""
        from forerun.run_folder.run_folder import RunFolder
        from forerun.track.metrics import read_metrics

        return Table(read_metrics(RunFolder(self.folder).metrics))

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json: losses, tokens, seconds and versions. Empty for an unfinished run."""
        from forerun.run_folder.run_folder import RunFolder

        file = RunFolder(self.folder).summary
        summary: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return summary

    def load_model(self, **options: Any) -> LanguageModel:
        """Load the model of the newest checkpoint. See `forerun.load_model` for the options."""
        from forerun.verbs.language_model import load_model

        return load_model(self.folder, **options)

    def export(self, to: str | os.PathLike[str], **options: Any) -> Export:
        """Write the model as a Hugging Face folder. See `forerun.export` for the options."""
        from forerun.verbs.export.export import export

        return export(self.folder, to, **options)

    def _repr_html_(self) -> str:
        from forerun.pages.render import render
        from forerun.pages.svg import loss_curve

        rows = [row for row in self.metrics if isinstance(row.get("loss"), float)]
        validation = [(row["step"], row["validation_loss"]) for row in self.metrics if row.get("validation_loss")]
        return render(
            "run.html.jinja",
            name=self.job.name,
            folder=str(self.folder),
            state="finished" if self.finished else "not finished",
            steps=rows[-1]["step"] if rows else 0,
            loss=f"{rows[-1]['loss']:.4f}" if rows else "none",
            curve=loss_curve([(row["step"], row["loss"]) for row in rows], validation) if len(rows) > 1 else None,
        )


def train(
    job: Job | str | os.PathLike[str],
    *,
    fresh: bool = False,
    take_over: bool = False,
    profile: Annotated[str, Value("FIRST:LAST")] | None = None,
    reporter: Reporter | None = None,
) -> Run:
    """Train a job in this process, from its newest checkpoint if it has one.

    A notebook shows a progress bar, a terminal the display of `forerun train`. If the call is interrupted, the same
    call resumes from the newest checkpoint. `forerun train --supervise` also restarts a run after failures, and trains
    on several hosts; both need processes of their own and are not part of this function.

    Args:
      job: a job, or the path of a job file
      fresh: start over; an earlier run of this name is renamed
      take_over: train a run that another process trains; the next save of that process fails
      profile: record these steps, such as 10:15, with the JAX profiler, for TensorBoard and Perfetto
      reporter: receives the progress; default: a display that fits the notebook or the terminal

    Returns:
      The run. `Run.finished` is False if it was asked to stop before its last step.

    Raises:
      UserError: The job has a mistake, the data cannot be read, or another process trains this run.
    """
    from forerun.config.schema import Job
    from forerun.run_folder.open_folder import require_run_in_place

    job_file, job = None if isinstance(job, Job) else Path(job), prepared(job)
    if not fresh:
        require_run_in_place(job, job_file)
    return train_in_place(job, fresh=fresh, take_over=take_over, profile=profile, reporter=reporter)


def train_in_place(
    job: Job,
    *,
    fresh: bool = False,
    take_over: bool = False,
    profile: str | None = None,
    reporter: Reporter | None = None,
) -> Run:
    """Train a prepared job. See `train`. A run whose folder was moved is not noticed here."""
    from forerun.run.step_range import range_of
    from forerun.run_folder.run_folder import folder_of
    from forerun.supervise.free_tpu import require_free_tpu_for

    steps = range_of(profile) if profile else None
    from forerun.run.train import train as train_run
    from forerun.track.display.make_display import make_display

    require_free_tpu_for(job.device, LineReporter(sys.stdout))
    with reporter or make_display(sys.stdout) as shown, run_lock(job, take_over=take_over, reporter=shown):
        finished = train_run(job, shown, fresh=fresh, profile=steps)
    folder = folder_of(job).path
    return Run(folder, job, finished is not None, finished.sample if finished else "")


def run_lock(job: Job, *, take_over: bool, reporter: Reporter) -> AbstractContextManager[None]:
    """Return the lock of the job's run. A run in a bucket has none: buckets have no locks."""
    from forerun.run_folder.run_folder import folder_of
    from forerun.storage.address import Address
    from forerun.supervise.run_lock import owned

    if Address.of(job.runs).is_remote:
        return nullcontext()
    return owned(folder_of(job).path, take_over=take_over, reporter=reporter)


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open the folder of an existing run, finished or not. The folder of a file with stages means its last stage.

    Raises:
      UserError: The folder is not a run.
    """
    from forerun.run_folder.run_folder import RunFolder, require_run
    from forerun.run_folder.stage_folder import run_of

    path = run_of(os.fspath(folder))
    job = require_run(RunFolder(path))
    return Run(path, job, finished=RunFolder(path).summary.is_file())
