"""`profile`: record a few steps of a job with the JAX profiler."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.reporter import LineReporter, Reporter
from forerun.verbs.job_files import prepared
from forerun.verbs.option_types import Count, Folder
from forerun.verbs.table import Table

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.data.feed import Feed
    from forerun.program.state import State
    from forerun.run.compile_step import CompiledStep
    from forerun.run.device_profile import ProfileSummary
    from forerun.run.profile_hook import Recording


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
    import jax

    from forerun.data.feed import Feed
    from forerun.data.read_ahead import read_ahead
    from forerun.files import atomic_write, require_writable_folder
    from forerun.hardware.devices import choose
    from forerun.resolve.resolve_model import resolve_model
    from forerun.resolve.teacher_targets import with_teacher_targets
    from forerun.run.compile_step import compile_step, use_cache
    from forerun.run.open_data import Placement, batches_of, open_corpus_with_progress
    from forerun.run.preference_reference import with_reference
    from forerun.run.profile_hook import SUMMARY, Recording, summary_of_session
    from forerun.run.run_devices import program_line, program_on
    from forerun.run.step_range import StepRange
    from forerun.run_folder.run_folder import RunFolder
    from forerun.supervise.free_tpu import require_free_tpu_for
    from forerun.supervise.worker import silent_worker
    from forerun.track.display.make_display import make_display
    from forerun.trained_model.base_weights import read_file_weights, require_matching_weights

    resolved = resolve_model(prepared(job))
    folder = Path("profiles") / resolved.job.name if to is None else Path(to)
    require_free_tpu_for(resolved.job.device, LineReporter(sys.stdout))
    with reporter or make_display(sys.stdout) as shown:
        require_writable_folder(folder, "--to")
        use_cache()
        chosen = choose(resolved.job.device, resolved.job.devices)
        shown.info(f"device: {chosen.reason}")
        corpus = open_corpus_with_progress(resolved, shown)
        resolved = resolved.with_data(corpus)
        require_matching_weights(resolved)
        corpus = with_teacher_targets(resolved, corpus)
        program = program_on(resolved, chosen, corpus.rows.epoch, shown)
        shown.info(program_line(resolved, program))
        step = compile_step(program, shown, resolved.job.name)
        with tempfile.TemporaryDirectory(prefix="forerun-profile-") as scratch:
            corpus = with_reference(resolved, program, corpus, RunFolder(Path(scratch)), shown, silent_worker())
        with shown.phase("state"):
            state = program.initial_state(resolved.job.seed, read_file_weights(resolved, program, reporter=shown))
        batches, placement = batches_of(resolved, program, corpus), Placement(program.batch)
        recording = Recording(folder, on_cpu=jax.default_backend() == "cpu")
        recorded = StepRange(warmup + 1, warmup + steps)
        try:
            with (
                read_ahead(batches, corpus.reads, recorded.last, has_ledger=False) as source,
                Feed(source, placement, 0, recorded.last, ahead=resolved.job.data.prefetch) as feed,
            ):
                with shown.phase("warm-up") as phase:
                    state = _run(step, state, feed, warmup)
                    phase.detail = f"{warmup} steps"
                with shown.phase("record") as phase:
                    recording.start()
                    _run(step, state, feed, steps, recording, recorded.first)
                    phase.detail = f"{steps} steps"
            session = recording.stop()
        finally:
            recording.discard()
        summary, text = summary_of_session(session, recorded)
        atomic_write(folder / SUMMARY, text)
    traces = sorted(session.glob("*.trace.json.gz"))
    return Profile(folder, traces[0] if traces else None, text, summary)


def _run(
    step: CompiledStep,
    state: State,
    feed: Feed[Any, Any],
    steps: int,
    recording: Recording | None = None,
    first: int = 1,
) -> State:
    """Run steps and return the state. Like `train`, keep at most one step in flight besides the newest one."""
    import jax

    before: Any = None
    for number in range(first, first + steps):
        if recording is not None:
            recording.next_step(number)
        state, metrics = step(state, next(feed))
        if before is not None:
            jax.device_get(before)
        before = metrics
    jax.block_until_ready(state)
    return state
