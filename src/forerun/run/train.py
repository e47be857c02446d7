"""`forerun train`: the phases of a run, from the choice of devices to the summary."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from forerun.checkpoint.disk_space import needed_bytes, require_disk_space
from forerun.checkpoint.hosts import summed
from forerun.checkpoint.reader import SkippedCheckpoint
from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.order.batches import Batches
from forerun.errors import UserError
from forerun.hardware import mesh
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.device_memory import DeviceMemory
from forerun.hardware.devices import DeviceChoice, choose
from forerun.hardware.slices import slice_count
from forerun.inputs.base_weights import (
    base_of,
    has_unsaved_weights,
    read_file_weights,
    require_matching_weights,
    require_same_base,
)
from forerun.inputs.job_corpus import open_corpus_with_progress
from forerun.inputs.job_warnings import warnings_of
from forerun.inputs.model_code import record_code
from forerun.inputs.resolve_job import resolve
from forerun.inputs.run_folder import require_usable
from forerun.inputs.saved_files import saved_files
from forerun.inputs.starting_weights import starting_weights
from forerun.inputs.stored_files import open_folder
from forerun.inputs.teacher_targets import with_teacher_targets
from forerun.methods.eight_bit_methods import eight_bit_note
from forerun.methods.kept import rounding_messages
from forerun.program.build import Program
from forerun.program.kernels import compute_capability
from forerun.program.state import State
from forerun.report.report_file import write_report
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.checkpoint_hook import retention_of, save_reporter
from forerun.run.compile.compile_step import compile_step, use_cache
from forerun.run.compile.program_record import program_record, write_program_record
from forerun.run.compile.unroll_choice import with_unroll_chosen
from forerun.run.device_errors import device_error
from forerun.run.extension import extension_of, extensions_of, require_steps_left
from forerun.run.finished_run import finished_summary
from forerun.run.guard import guard_of
from forerun.run.placement import Placement
from forerun.run.preference_reference import with_reference
from forerun.run.preflight import check_before_compile, require_same_data
from forerun.run.prepared_run import PreparedRun, ResumePoint, final_sample, finish_files, train_steps
from forerun.run.present_slices import report_slices, session_slices, stop_message
from forerun.run.profiling.profile_hook import still_ahead
from forerun.run.profiling.step_range import StepRange
from forerun.run.replicas import replica_check_of
from forerun.run.sample import sampler_of
from forerun.run.throughput import Throughput
from forerun.run.validation import Validation
from forerun.supervise.worker.worker import Worker, silent_worker
from forerun.track.backends.job_trackers import trackers_of
from forerun.track.display.display import Display
from forerun.track.run_times import RunTimes
from forerun.units import Count


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. If an earlier process finished it, `state` is None and `sample` is empty."""

    summary: dict[str, Any]
    sample: str
    state: State | None


def train(
    job: Job,
    display: Display,
    *,
    fresh: bool = False,
    worker: Worker | None = None,
    profile: StepRange | None = None,
) -> TrainResult | None:
    """Run a job to its end, from its newest checkpoint if it has one.

    Args:
      job: the job as written. Its open values, such as `steps`, are filled in here.
      display: shows phases, warnings and progress to the user.
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
        return _train(job, display, fresh, worker, times, profile)
    except BaseException as error:
        known = _device_error(error, worker)
        times.fail(known or error)
        if known is not None:
            raise known from error
        raise
    finally:
        times.close()


def _device_error(error: BaseException, worker: Worker) -> UserError | None:
    """Return the error for the user if `error` comes from a device and has a known cause."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None  # before the devices are open, asking for them would open them
    devices = jax.devices()
    return device_error(error, devices[0].device_kind, len(devices), worker.hosts)


def _train(
    job: Job,
    display: Display,
    fresh: bool,
    worker: Worker,
    times: RunTimes,
    profile: StepRange | None,
) -> TrainResult | None:
    if worker.first:
        require_usable(job)
    use_cache()
    worker.initialize_jax()

    # ---- Devices, and the checks that need no data ----
    chosen = replace(choose(job.device, job.devices), slices=worker.slices)
    times.describe(devices=len(chosen.devices), **session_slices(job, worker))
    display.say(f"device: {chosen.reason}")
    report_slices(job, worker, display)
    if chosen.warning:
        display.warn(chosen.warning)
    mesh_on(job, chosen)  # raises if the mesh is impossible
    trackers_of(job.track)  # raises if a tracker is not installed
    if not fresh and (summary := finished_summary(job, display.say)) is not None:
        return finished_result(summary, profile, worker, display)
    display.say(f"model: {starting_weights(job)}")
    for text in warnings_of(job):
        display.warn(text)

    # ---- Data: read, tokenized and packed into rows of one length ----
    worker.pulse.phase("data")
    times.phase("data")
    corpus = open_corpus_with_progress(job, display, (worker.index, worker.hosts))
    # The supervisor compares facts of all hosts: hosts with different data would train on inconsistent batches.
    worker.pulse.fact("data digest", corpus.digest)

    # ---- Program: the same one that `plan` compiles ----
    worker.pulse.phase("compile")
    epochs, resolved = job.steps is None, resolve(job, corpus)
    job = resolved.job
    require_matching_weights(resolved)
    if profile is not None:
        profile.require_reached(resolved.steps)
    # The number of steps of a job in epochs is known only now, after its data was read.
    if epochs and not fresh and (summary := finished_summary(job, display.say)) is not None:
        return finished_result(summary, profile, worker, display)
    corpus = with_teacher_targets(resolved, corpus)
    worker.pulse.fact("data and cache digest", corpus.digest)
    program = program_on(resolved, chosen, corpus.rows.epoch, display.say)
    # Hosts with different programs would wait for each other's collectives forever.
    worker.pulse.fact("unroll", str(program.compute.unroll))
    display.say(described(resolved, program))
    if (kernel := attention_note(resolved, chosen)) is not None:
        display.say(kernel)
    if (note := eight_bit_note(job, program.eight_bits)) is not None:
        display.say(note)
    for text, is_warning in rounding_messages(job):
        (display.warn if is_warning else display.say)(text)
    folder = open_folder(job, fresh=fresh, writes=worker.first, tell=display.warn)
    if worker.first:
        record_code(folder, job, display.say, display.warn)
        times.open(folder.events, display.warn)
    checkpoints = folder.checkpoints(job)
    require_disk_space(
        checkpoints, needed_bytes(program.saved(program.state), job.checkpoint.keep + job.checkpoint.keep_best)
    )
    check_before_compile(resolved, program, corpus, checkpoints)
    times.phase("compile")
    step = compile_step(program, display, job.name)
    if worker.first:
        write_program_record(folder, program_record(resolved, program, chosen, step.hash), display.warn)
    with times.spent("startup"):  # preparation of the data
        corpus = with_reference(resolved, program, corpus, folder, display, worker)
    batches = batches_of(job, program, corpus)
    prepared = PreparedRun(
        resolved=resolved,
        devices=chosen,
        corpus=corpus,
        program=program,
        compiled_step=step,
        batches=batches,
        folder=folder,
        replica_check=replica_check_of(job, program, display),
        validation=Validation(job, program, corpus, display),
        times=times,
        sampler=sampler_of(job, program, corpus.tokenizer),
    )

    # ---- State: a new one, or that of the newest good checkpoint ----
    worker.pulse.phase("restore")
    times.phase("restore")
    with CheckpointStore(checkpoints, keep=retention_of(job), tell=save_reporter(display, worker)) as store:
        with display.phase("state") as phase:
            state, first, skipped = state_of(resolved, program, store, corpus, display.warn)
            record = store.record(first) if first else {}
            prepared.validation.resume(record, first)
            phase.detail = f"step {first} from {checkpoints}" if first else starting_weights(job)
        worker.pulse.fact("checkpoint", f"step {first}")
        times.resume(first)
        for damaged in skipped:
            display.warn(f"skipped a damaged checkpoint: {damaged}")

        require_steps_left(job, first, checkpoints)
        if profile is not None:
            profile = still_ahead(profile, first, resolved.steps, worker, display.warn)
        extension = extension_of(job, record, first, int(state.step))
        if extension is not None:
            display.warn(extension.said(job.optimizer.schedule))
        saved = saved_files(store, first)
        if not saved.complete:
            display.say("an older version saved this checkpoint: the files of the run are not compared with it")
        memory = DeviceMemory(local_devices(chosen))
        worker.pulse.measure_memory(memory.fullest)
        throughput = Throughput(program, first, peak_flops(chosen), memory)
        guard = guard_of(job, folder, saved, display.warn)
        resume = ResumePoint(
            saved, guard, extension, extensions_of(record, extension), base_of(program, state), profile
        )

        if prepared.sampler is not None:
            with times.spent("compile"), display.phase("compile samples"):
                prepared.sampler.compile(state)

        # ---- Steps ----
        try:
            with worker.saving_at_ctrl_c():
                state = train_steps(prepared, resume, state, throughput, store, display, worker)
        finally:
            display.close()

    # ---- Result ----
    worker.pulse.phase("finish")
    validation = prepared.validation
    if (throughput.step < throughput.last and not validation.is_exhausted) or validation.is_pending(throughput.step):
        at = throughput.step
        reason, text = stop_message(at, worker)
        times.stop(at, reason)
        display.say(text)
        if worker.first:
            write_report(folder, job, display.warn, stopped=True)
        return None
    if throughput.step < throughput.last:
        display.say(f"ended at step {throughput.step}: {validation.stop_reason}")
    reads = {} if prepared.corpus.reads is None else summed(prepared.corpus.reads.figures())
    summary = finish_files(prepared, resume, throughput, store, reads) if worker.first else {}
    if worker.first:
        write_report(folder, job, display.warn)
    return TrainResult(summary, final_sample(prepared, state), state)


def finished_result(
    summary: dict[str, Any], profile: StepRange | None, worker: Worker, display: Display
) -> TrainResult:
    """Return the result of a run that an earlier process finished. Raise if a profile of it is asked for."""
    if profile is not None:
        still_ahead(profile, max(profile.first, summary["steps"]), summary["steps"], worker, display.warn)
    return TrainResult(summary, "", None)


def mesh_on(job: Job, chosen: DeviceChoice) -> mesh.MeshShape:
    wanted = job.mesh
    slices = mesh.slices_of(
        chosen.slices or wanted.slices,
        slice_count(chosen.devices),
        chosen.platform,
        job.devices,
        "this machine",
        wanted.min_slices,
    )
    devices = len(chosen.devices)
    sizes = wanted.data, wanted.fsdp, wanted.tp
    return mesh.resolve(*sizes, devices, slices=slices, context=wanted.context, expert=wanted.expert)


def program_on(
    resolved: ResolvedJob, chosen: DeviceChoice, rows: int | None, tell: Callable[[str], None] = lambda text: None
) -> Program:
    """Return the Program on the chosen devices.

    Args:
      resolved: the job.
      chosen: the devices.
      rows: the number of rows of an epoch, or None if it is unknown.
      tell: receives a line about each value that was chosen for the devices.
    """
    resolved = with_unroll_chosen(resolved, chosen, tell)
    return resolved.program(mesh_on(resolved.job, chosen), chosen.devices, rows)


def attention_note(resolved: ResolvedJob, chosen: DeviceChoice) -> str | None:
    """Return a line about the attention kernel on GPUs, and wherever the fastest kernel cannot run; otherwise None."""
    first = chosen.devices[0]
    if resolved.model.heads is None:
        return None
    capability = compute_capability(first)
    choice = resolved.attention(first.platform, first.device_kind, capability)
    if capability is None and not choice.obstacle:
        return None
    return f"attention: {choice.kernel.name}{f', because {choice.obstacle}' if choice.obstacle else ''}"


def batches_of(job: Job, program: Program, corpus: Corpus) -> Batches:
    """Return the batches of a run. Each host builds only the rows of its devices.

    The global batch t depends only on the seed and on t. A resumed run, also on another mesh, sees the same batches.
    """
    accumulation, held = program.derived.accumulation, Placement(program.batch).held
    return Batches(corpus.rows, seed=job.seed, batch=job.batch, accumulation=accumulation, held=held)


def state_of(
    resolved: ResolvedJob, program: Program, store: CheckpointStore, corpus: Corpus, tell: Callable[[str], None]
) -> tuple[State, int, tuple[SkippedCheckpoint, ...]]:
    """Return the state to start from, its step, and the damaged checkpoints that were skipped.

    The state comes from the newest good checkpoint. A new run starts with random or pretrained weights.

    Raises:
      UserError: the data or the frozen weights are not those of the checkpoint.
    """
    job, newest = resolved.job, store.newest()
    if newest is None:
        return program.initial_state(job.seed, read_file_weights(resolved, program, tell=tell)), 0, ()
    require_same_data(job, corpus, newest, store.record(newest).get("data"))
    restored = store.restore_newest(program.saved(program.state))
    assert restored is not None
    state = restored.state
    if has_unsaved_weights(program):
        state = program.resumed(state, job.seed, read_file_weights(resolved, program, resumes=True))
        require_same_base(store.record(restored.step).get("base"), base_of(program, state), job)
    return state, restored.step, restored.skipped


def peak_flops(chosen: DeviceChoice) -> float | None:
    """Return the peak FLOP/s of all devices, or None for an unknown chip."""
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    if chip is None or chip.bf16_flops_per_device is None:
        return None
    return chip.bf16_flops_per_device * len(chosen.devices)


def local_devices(chosen: DeviceChoice) -> list[jax.Device]:
    """Return the chosen devices that are attached to this host."""
    return [device for device in chosen.devices if device.process_index == jax.process_index()]


def described(resolved: ResolvedJob, program: Program) -> str:
    """Return a line for the user about the program: parameters, mesh, steps, kernel, remat."""
    derived, learning = program.derived, resolved.trainable_parameters
    which = "" if learning == resolved.parameters else f", {Count(learning)} of them trainable"
    return (
        f"program: {Count(resolved.parameters)} parameters{which}, mesh {derived.mesh}, "
        f"{derived.steps} steps of {Count(derived.tokens_per_step)} tokens "
        f"({derived.micro_batch} x {derived.accumulation} x {derived.mesh.data_parallel} sequences), "
        f"attention {program.compute.attention.name}, remat {program.compute.remat.policy}"
    )
