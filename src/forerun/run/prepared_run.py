"""A run before and during its steps: what was read, checked and compiled, and where it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from forerun.checkpoint.hosts import summed
from forerun.checkpoint.store import CheckpointStore
from forerun.data.corpus import Corpus
from forerun.data.feed import Feed
from forerun.data.order.batches import Batches
from forerun.data.order.ledger import Ledger
from forerun.data.read_ahead import read_ahead
from forerun.hardware.devices import DeviceChoice
from forerun.program.build import Program
from forerun.program.state import State
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.checkpoint_hook import CheckpointHook, CheckpointRecords, SaveSchedule
from forerun.run.compile_step import CompiledStep, forbid_compilation
from forerun.run.extension import Extension
from forerun.run.guard import DivergenceGuard
from forerun.run.hooks import Hook, LedgerHook, MetricsHook, ProgressHook, RunSession, ValidationHook
from forerun.run.open_data import Placement
from forerun.run.preference_reference import REFERENCE, recorded_base
from forerun.run.profile_hook import profiling
from forerun.run.replicas import ReplicaCheck
from forerun.run.sample import SampleHook, Sampler, sample_text, weights_of
from forerun.run.step_range import StepRange
from forerun.run.steps import StepPipeline, batches_until_stop, run_steps
from forerun.run.summary import summary_of
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.run_folder.run_folder import RunFolder
from forerun.run_folder.stored_files import LEDGER, METRICS, SavedFiles, StoredFiles, read_summary, store_summary
from forerun.track.forwarder import tracking
from forerun.track.metrics import MetricsLog, write_summary


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run before its state exists: everything is read, checked and compiled."""

    session: RunSession
    devices: DeviceChoice
    corpus: Corpus
    program: Program
    compiled_step: CompiledStep
    batches: Batches
    folder: RunFolder
    replica_check: ReplicaCheck
    validation: Validation
    sampler: Sampler | None = None

    @property
    def resolved(self) -> ResolvedJob:
        """The job, with its steps."""
        return self.session.resolved


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts.

    Args:
      saved: what the checkpoint that the run starts from records about the run's files. Its step is 0 for a new run.
      guard: decides after rejected steps. It contains the steps that were skipped so far.
      extension: the change of the number of steps since the checkpoint, or None.
      extensions: all such changes of the run, as checkpoints and the summary record them.
      base: fingerprint of the frozen weights, or None if the checkpoints contain all weights.
      profile: the steps to record with the profiler, or None.
    """

    saved: SavedFiles
    guard: DivergenceGuard
    extension: Extension | None
    extensions: dict[str, Any]
    base: str | None
    profile: StepRange | None = None


def train_steps(
    prepared: PreparedRun,
    resume: ResumePoint,
    state: State,
    throughput: Throughput,
    store: CheckpointStore,
) -> State:
    """Run the steps of a prepared run with all its hooks. Return the state after the last step."""
    session, worker, times = prepared.session, prepared.session.worker, prepared.session.times
    resolved, job = prepared.resolved, prepared.resolved.job
    program, batches = prepared.program, prepared.batches
    folder, validation, saved = prepared.folder, prepared.validation, resume.saved
    first, last = throughput.first, throughput.last
    guard, placement, reads = resume.guard, Placement(program.batch), prepared.corpus.reads
    constant_record = {
        "program": prepared.compiled_step.hash,
        "data": prepared.corpus.digest,
        "base": resume.base,
        REFERENCE: recorded_base(folder),
        **resume.extensions,
    }
    with (
        open_metrics(session, folder, saved, last) as metrics_log,
        open_ledger(session, folder, saved) as ledger,
        read_ahead(batches, reads, last, has_ledger=ledger is not None) as source,
        Feed(source, placement, first, last, ahead=job.data.prefetch) as feed,
        forbid_compilation() as require_no_compilation,
        profiling(session, resume.profile, folder, throughput) as profile_hooks,
    ):
        # If the checkpoints are in a bucket, another machine may resume the run from them alone. The run's files are
        # therefore stored with them.
        is_elsewhere = isinstance(folder.checkpoints(job), str)
        journals = {METRICS: metrics_log, LEDGER: ledger}
        records = CheckpointRecords(
            resolved=resolved,
            constant=constant_record,
            guard=guard,
            validation=validation,
            throughput=throughput,
            metrics_log=metrics_log,
            ledger=ledger,
            stored_files=StoredFiles(folder, saved, journals, times.log) if is_elsewhere else None,
        )
        schedule = SaveSchedule(resolved, program, first, last, session.reporter)
        replica_check = prepared.replica_check
        # The hooks act in this order at each event. A step's replicas are compared before the step is recorded, and a
        # checkpoint includes the result of the validation and the samples at its step.
        hooks: list[Hook] = [
            *profile_hooks,
            ValidationHook(session, validation, throughput, metrics_log),
            SampleHook(session, prepared.sampler, throughput, lambda: validation.is_exhausted, metrics_log),
            CheckpointHook(session, store, schedule, records, replica_check, program, first),
            replica_check,
            ProgressHook(worker, require_no_compilation),
            LedgerHook(ledger, source),
            MetricsHook(session, throughput, metrics_log, feed, resume.extension, reads),
        ]
        pipeline = StepPipeline(
            state,
            guard,
            prepared.compiled_step,
            lambda step: placement(batches.batch_at(step - 1)),
            jax.device_get,
        )
        times.phase("steps")
        try:
            return run_steps(pipeline, batches_until_stop(feed, first, validation, worker), hooks, first)
        finally:
            times.phase("finish")


@contextmanager
def open_metrics(session: RunSession, folder: RunFolder, saved: SavedFiles, last: int) -> Iterator[MetricsLog | None]:
    """Open metrics.jsonl and start the trackers that read it. Yield None on all hosts but the first.

    Args:
      saved: what the checkpoint that the run resumes from records about the file.
      last: the last step of the run.
    """
    if not session.worker.first:
        yield None
        return
    path, reporter = folder.metrics, session.reporter
    with (
        MetricsLog(path, resume_at=saved.step, seals=saved.seals(METRICS), reporter=reporter) as log,
        tracking(session.resolved.job, path, last, reporter),
    ):
        yield log


@contextmanager
def open_ledger(session: RunSession, folder: RunFolder, saved: SavedFiles) -> Iterator[Ledger | None]:
    """Open the ledger. Yield None if the job does not ask for one, and on all hosts but the first."""
    if not session.resolved.job.data.ledger or not session.worker.first:
        yield None
        return
    with Ledger(folder.ledger, saved.step + 1, seals=saved.seals(LEDGER), reporter=session.reporter) as ledger:
        yield ledger


def finish_files(
    prepared: PreparedRun,
    resume: ResumePoint,
    throughput: Throughput,
    store: CheckpointStore,
) -> dict[str, Any]:
    """Write summary.json, store it with the checkpoints, and return its content. Only the first host has a summary.

    All hosts call this together, because the summary has the reads of stores in a bucket of all hosts.
    """
    reads = {} if prepared.corpus.reads is None else summed(prepared.corpus.reads.figures())
    if not prepared.session.worker.first:
        return {}
    job, folder = prepared.resolved.job, prepared.folder
    goodput = prepared.session.times.end(throughput.step)
    # A process that ran no step keeps the summary of the earlier one, which has the times of steps.
    summary = None if throughput.step_seconds else read_summary(folder, throughput.step)
    if summary is None:
        program, step, validation = prepared.program, prepared.compiled_step, prepared.validation
        summary = (
            summary_of(prepared.resolved, program, step, throughput, validation, prepared.devices, folder)
            | resume.extensions
        )
        summary |= reads
        summary["goodput"] = None if goodput is None else goodput.as_dict()
        write_summary(folder.summary, summary)
    store_summary(folder.checkpoints(job), store, folder)
    return summary


def final_sample(prepared: PreparedRun, state: State) -> str:
    """Return text that the trained model generates, or "" if the job does not ask for a sample."""
    job, program = prepared.resolved.job, prepared.program
    if not job.sample.tokens:
        return ""
    weights = weights_of(program, state)
    if prepared.sampler is not None:  # its programs are compiled already
        return prepared.sampler.complete(job.sample.prompt, weights)[1]
    return sample_text(program, weights, prepared.corpus.tokenizer, job.sample, job.sequence, job.seed)
