"""`forerun profile`: record a few steps of a job on the devices of this machine, without a run.

The steps are those of `train`: the same program, data and prefetching. There is no run folder, no checkpoint and no
tracker, so an existing run of the job does not change.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from forerun.data.feed import Feed
from forerun.data.read_ahead import read_ahead
from forerun.files import atomic_write, require_writable_folder
from forerun.hardware.devices import choose
from forerun.program.state import State
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.resolve.teacher_targets import with_teacher_targets
from forerun.run.compile.compile_step import CompiledStep, compile_step, use_cache
from forerun.run.open_data import Placement, batches_of, open_corpus_with_progress
from forerun.run.preference_reference import with_reference
from forerun.run.profiling.profile_hook import SUMMARY, summary_of_session
from forerun.run.profiling.profile_summary import ProfileSummary
from forerun.run.profiling.recording import Recording
from forerun.run.profiling.step_range import StepRange
from forerun.run.run_devices import program_line, program_on
from forerun.run_folder.run_folder import RunFolder
from forerun.supervise.worker import silent_worker
from forerun.trained_model.base_weights import read_file_weights, require_matching_weights


@dataclass(frozen=True)
class RecordedSteps:
    """A recording. `session` is the folder with its files, `summary` is None if it has no operations of a device."""

    session: Path
    summary: ProfileSummary | None
    text: str


def profile_steps(resolved: ResolvedJob, folder: Path, reporter: Reporter, *, steps: int, warmup: int) -> RecordedSteps:
    """Run `warmup` steps of a job, then record `steps` steps.

    Args:
      resolved: the job.
      folder: the folder to write the trace and its summary to.
      reporter: shows the phases.
      steps: number of steps to record.
      warmup: number of steps before. The first steps allocate memory, and are slower.

    Raises:
      UserError: the job, the data or the devices cannot be used.
    """
    require_writable_folder(folder, "--to")
    use_cache()
    job = resolved.job
    chosen = choose(job.device, job.devices)
    reporter.info(f"device: {chosen.reason}")
    corpus = open_corpus_with_progress(resolved, reporter)
    resolved = resolved.with_data(corpus)
    require_matching_weights(resolved)
    corpus = with_teacher_targets(resolved, corpus)
    program = program_on(resolved, chosen, corpus.rows.epoch, reporter)
    reporter.info(program_line(resolved, program))
    step = compile_step(program, reporter, job.name)
    with tempfile.TemporaryDirectory(prefix="forerun-profile-") as scratch:
        corpus = with_reference(resolved, program, corpus, RunFolder(Path(scratch)), reporter, silent_worker())
    with reporter.phase("state"):
        state = program.initial_state(job.seed, read_file_weights(resolved, program, reporter=reporter))
    batches, placement = batches_of(resolved, program, corpus), Placement(program.batch)
    recording = Recording(folder, on_cpu=jax.default_backend() == "cpu")
    recorded = StepRange(warmup + 1, warmup + steps)
    try:
        with (
            read_ahead(batches, corpus.reads, recorded.last, has_ledger=False) as source,
            Feed(source, placement, 0, recorded.last, ahead=job.data.prefetch) as feed,
        ):
            with reporter.phase("warm-up") as phase:
                state = _run(step, state, feed, warmup)
                phase.detail = f"{warmup} steps"
            with reporter.phase("record") as phase:
                recording.start()
                _run(step, state, feed, steps, recording, recorded.first)
                phase.detail = f"{steps} steps"
        session = recording.stop()
    finally:
        recording.discard()
    summary, text = summary_of_session(session, recorded)
    atomic_write(folder / SUMMARY, text)
    return RecordedSteps(session, summary, text)


def _run(
    step: CompiledStep,
    state: State,
    feed: Feed[Any, Any],
    steps: int,
    recording: Recording | None = None,
    first: int = 1,
) -> State:
    """Run steps and return the state. Like `train`, keep at most one step in flight besides the newest one."""
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
