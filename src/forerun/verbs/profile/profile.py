"""`profile`: record a few steps of a job with the JAX profiler."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.reporter import LineReporter, Reporter
from forerun.verbs.job_files import prepared
from forerun.verbs.option_types import Count, Folder
from forerun.verbs.table import Table

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.run.profiling.profile_summary import ProfileSummary


@dataclass(frozen=True)
class Profile:
    """The recording of a few steps. Printing it shows the text summary.

    Attributes:
      folder: the folder with `profile.txt` and the traces, for `tensorboard --logdir`.
      trace: the trace that https://ui.perfetto.dev opens, or None if the profiler wrote none.
      text: the summary as text.
    """

    folder: Path
    trace: Path | None
    text: str = field(repr=False)
    _summary: ProfileSummary | None = field(repr=False)

    @property
    def operations(self) -> Table:
        """The operations that take most time: seconds and calls per step and device, and their kind."""
        found = () if self._summary is None else self._summary.operations
        return Table({"name": one.name, "seconds": one.seconds, "calls": one.calls, "kind": one.kind} for one in found)

    @property
    def step_seconds(self) -> float | None:
        """The mean time of a step, with the pauses between steps."""
        return None if self._summary is None else self._summary.step_seconds

    @property
    def idle_seconds(self) -> float | None:
        """The mean time of a step in which a device did nothing."""
        return None if self._summary is None else self._summary.idle_seconds

    def __str__(self) -> str:
        perfetto = "" if self.trace is None else f"\n  Perfetto:    open {self.trace} at https://ui.perfetto.dev"
        return f"{self.text}{perfetto}\n  TensorBoard: tensorboard --logdir {self.folder}"

    def __repr__(self) -> str:
        return self.text.rstrip("\n")


def profile(
    job: Job | str | os.PathLike[str],
    *,
    steps: Count = 5,
    warmup: Count = 3,
    to: Folder | None = None,
    reporter: Reporter | None = None,
) -> Profile:
    """Run a few steps of a job on the devices of this machine and record them with the JAX profiler.

    The job's run does not change: no checkpoint and no metrics are written. TensorBoard's profile plugin and Perfetto
    open the recording.

    Args:
      job: a job, or the path of a job file
      steps: number of steps to record
      warmup: number of steps before the recording
      to: folder for the trace (default: profiles/NAME)
      reporter: receives the progress; default: a display that fits the notebook or the terminal

    Returns:
      The recording and its summary.

    Raises:
      UserError: The job has a mistake, its data cannot be read, or it cannot run on these devices.
    """
    from forerun.resolve.resolve_model import resolve_model
    from forerun.supervise.free_tpu import require_free_tpu_for
    from forerun.track.display.make_display import make_display
    from forerun.verbs.profile.profile_steps import profile_steps

    resolved = resolve_model(prepared(job))
    folder = Path("profiles") / resolved.job.name if to is None else Path(to)
    require_free_tpu_for(resolved.job.device, LineReporter(sys.stdout))
    with reporter or make_display(sys.stdout) as shown:
        recorded = profile_steps(resolved, folder, shown, steps=steps, warmup=warmup)
    traces = sorted(recorded.session.glob("*.trace.json.gz"))
    return Profile(folder, traces[0] if traces else None, recorded.text, recorded.summary)
