"""`forerun train`: the phases of a run, from the choice of devices to the summary."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.methods.job_notes import warnings_of
from forerun.program.state import State
from forerun.report.differences import program_facts, write_program_facts
from forerun.report.page import write_report
from forerun.reporter import Reporter
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.teacher_targets import with_teacher_targets
from forerun.run.checkpoint_hook import SaveReporter, retention_of
from forerun.run.compile_step import compile_step, use_cache
from forerun.run.device_errors import user_error_of
from forerun.run.hooks import RunSession
from forerun.run.open_data import batches_of, open_corpus_with_progress
from forerun.run.preference_reference import with_reference
from forerun.run.prepared_run import PreparedRun, final_sample, finish_files, train_steps
from forerun.run.profile_hook import still_ahead
from forerun.run.replicas import replica_check_of
from forerun.run.restore import check_before_compile, check_before_data, restore
from forerun.run.run_devices import choose_devices, program_on, report_program, session_slices
from forerun.run.sample import sampler_of
from forerun.run.step_range import StepRange
from forerun.run.summary import finished_summary
from forerun.run.validation import Validation
from forerun.run_folder.model_code import record_code
from forerun.run_folder.open_folder import open_folder
from forerun.supervise.worker import Worker, silent_worker
from forerun.track.run_times import RunTimes
from forerun.trained_model.base_weights import require_matching_weights


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. If an earlier process finished it, `state` is None and `sample` is empty."""

    summary: dict[str, Any]
    sample: str
    state: State | None


def train(
    job: Job,
    reporter: Reporter,
    *,
    fresh: bool = False,
    worker: Worker | None = None,
    profile: StepRange | None = None,
) -> TrainResult | None:
    """Run a job to its end, from its newest checkpoint if it has one.

    Args:
      job: the job as written. Its open values, such as `steps`, are filled in here.
      reporter: shows phases, warnings and progress to the user.
      fresh: start over. An earlier run of this name is renamed.
      worker: connects the run to its supervisor, if there is one.
      profile: the steps to record with the profiler.

    Returns:
      The result, or None if the run was asked to stop before its end.

    Raises:
      UserError: the job, the data or the checkpoints cannot be used, or the run diverged.
    """
    worker = worker or silent_worker()
    times = RunTimes(worker.take_start_seconds(), pid=os.getpid(), hosts=worker.hosts)
    try:
        session = RunSession(resolve_model(job), reporter, worker, times, profile)
        return _train(session, fresh)
    except BaseException as error:
        known = user_error_of(error, worker.hosts)
        times.fail(known or error)
        if known is not None:
            raise known from error
        raise
    finally:
        times.close()


def _train(session: RunSession, fresh: bool) -> TrainResult | None:
    resolved, reporter, worker, times = session.resolved, session.reporter, session.worker, session.times

    # ---- What can be known without data: a mistake ends the run within seconds ----
    check_before_data(resolved, worker)
    use_cache()
    worker.initialize_jax()
    devices = choose_devices(resolved, reporter, worker)
    times.describe(devices=len(devices.devices), **session_slices(resolved, worker))
    if not fresh and (summary := finished_summary(resolved, reporter)) is not None:
        return _finished_result(summary, session)
    reporter.info(f"model: {resolved.starting_weights}")
    for text in warnings_of(resolved):
        reporter.warn(text)

    # ---- Data: read, tokenized and packed into rows of one length ----
    session.phase("data")
    corpus = open_corpus_with_progress(resolved, reporter, (worker.index, worker.hosts))
    # The supervisor compares facts of all hosts: hosts with different data would train on inconsistent batches.
    worker.pulse.fact("data digest", corpus.digest)

    # ---- Program: the same one that `plan` compiles ----
    worker.pulse.phase("compile")
    has_open_steps, resolved = resolved.job.steps is None, resolved.with_data(corpus)
    session = replace(session, resolved=resolved)
    require_matching_weights(resolved)
    if session.profile is not None:
        session.profile.require_reached(resolved.steps)
    # The number of steps of a job in epochs is known only now, after its data was read.
    if has_open_steps and not fresh and (summary := finished_summary(resolved, reporter)) is not None:
        return _finished_result(summary, session)
    corpus = with_teacher_targets(resolved, corpus)
    worker.pulse.fact("data and cache digest", corpus.digest)
    program = program_on(resolved, devices, corpus.rows.epoch, reporter)
    # Hosts with different programs would wait for each other's collectives forever.
    worker.pulse.fact("unroll", str(program.compute.unroll))
    report_program(resolved, program, devices, reporter)
    folder = open_folder(resolved.job, fresh=fresh, writes=worker.first, reporter=reporter)
    if worker.first:
        record_code(folder, resolved.job, reporter)
        times.open(folder.events, reporter)
    checkpoints = folder.checkpoints(resolved.job)
    check_before_compile(resolved, program, corpus, checkpoints)
    times.phase("compile")
    step = compile_step(program, reporter, resolved.job.name)
    if worker.first:
        write_program_facts(folder, program_facts(resolved, program, devices.devices, step.hash), reporter)
    with times.spent("startup"):  # preparation of the data
        corpus = with_reference(resolved, program, corpus, folder, reporter, worker)
    prepared = PreparedRun(
        session=session,
        devices=devices,
        corpus=corpus,
        program=program,
        compiled_step=step,
        batches=batches_of(resolved, program, corpus),
        folder=folder,
        replica_check=replica_check_of(resolved, program, reporter),
        validation=Validation(resolved, program, corpus, reporter),
        sampler=sampler_of(resolved, program, corpus.tokenizer),
    )

    # ---- State: a new one, or that of the newest good checkpoint ----
    session.phase("restore")
    with CheckpointStore(checkpoints, keep=retention_of(resolved), reporter=SaveReporter(reporter, worker)) as store:
        state, resume, throughput = restore(prepared, store)
        if prepared.sampler is not None:
            with times.spent("compile"), reporter.phase("compile samples"):
                prepared.sampler.compile(state)

        # ---- Steps ----
        try:
            with worker.saving_at_ctrl_c():
                state = train_steps(prepared, resume, state, throughput, store)
        finally:
            reporter.close()

    # ---- Result ----
    worker.pulse.phase("finish")
    validation, last_step = prepared.validation, throughput.step
    ended_early = last_step < throughput.last and validation.is_exhausted
    if (last_step < throughput.last and not ended_early) or validation.is_pending(last_step):
        times.stop(last_step, "asked" if worker.stop.ends_job else "slices")
        reporter.info(_stop_message(last_step, worker))
        if worker.first:
            write_report(folder, resolved.job, reporter, stopped=True)
        return None
    if ended_early:
        reporter.info(f"ended at step {last_step}: {validation.stop_reason}")
    summary = finish_files(prepared, resume, throughput, store)
    if worker.first:
        write_report(folder, resolved.job, reporter)
    return TrainResult(summary, final_sample(prepared, state), state)


def _finished_result(summary: dict[str, Any], session: RunSession) -> TrainResult:
    """Return the result of a run that an earlier process finished. Raise if a profile of it is asked for."""
    profile, steps = session.profile, summary["steps"]
    if profile is not None:
        still_ahead(profile, max(profile.first, steps), steps, session.worker, session.reporter)
    return TrainResult(summary, "", None)


def _stop_message(step: int, worker: Worker) -> str:
    """Return the line for the user about a stop at this step."""
    if worker.stop.ends_job:
        return f"stopped as asked after step {step}: the same command resumes from the newest checkpoint"
    return f"stopped after step {step}: the run continues from here with more slices"
