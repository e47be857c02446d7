"""The state that a run starts from: a new one, or that of the newest good checkpoint."""

from __future__ import annotations

from forerun.checkpoint.reader import SkippedCheckpoint
from forerun.checkpoint.store import CheckpointStore
from forerun.hardware.device_memory import DeviceMemory
from forerun.program.state import State
from forerun.reporter import Reporter
from forerun.run.extension import extension_of, extensions_of, require_steps_left
from forerun.run.guard import guard_of
from forerun.run.preflight import require_same_data
from forerun.run.prepared_run import PreparedRun, ResumePoint
from forerun.run.profiling.profile_hook import still_ahead
from forerun.run.run_devices import local_devices, peak_flops
from forerun.run.throughput import Throughput
from forerun.run_folder.stored_files import saved_files
from forerun.trained_model.base_weights import base_of, has_unsaved_weights, read_file_weights, require_same_base


def restore(prepared: PreparedRun, store: CheckpointStore) -> tuple[State, ResumePoint, Throughput]:
    """Return the state to start from, what its checkpoint records about the run, and the clock of the steps.

    Raises:
      UserError: the data or the frozen weights are not those of the checkpoint, or no step is left.
    """
    session, resolved = prepared.session, prepared.resolved
    program, folder, reporter, worker = prepared.program, prepared.folder, session.reporter, session.worker
    checkpoints = folder.checkpoints(resolved.job)
    with reporter.phase("state") as phase:
        state, first, skipped = state_of(prepared, store, reporter)
        record = store.record(first) if first else {}
        prepared.validation.resume(record, first)
        phase.detail = f"step {first} from {checkpoints}" if first else resolved.starting_weights
    # Hosts that start from different steps would train on inconsistent batches.
    worker.pulse.fact("checkpoint", f"step {first}")
    session.times.resume(first)
    for damaged in skipped:
        reporter.warn(f"skipped a damaged checkpoint: {damaged}")

    require_steps_left(resolved, first, checkpoints)
    profile = session.profile
    if profile is not None:
        profile = still_ahead(profile, first, resolved.steps, worker, reporter)
    extension = extension_of(resolved, record, first, int(state.step))
    if extension is not None:
        reporter.warn(extension.said(resolved.job.optimizer.schedule))
    saved = saved_files(store, first)
    memory = DeviceMemory(local_devices(prepared.devices))
    worker.pulse.measure_memory(memory.fullest)
    resume = ResumePoint(
        saved,
        guard_of(resolved, folder, saved, reporter),
        extension,
        extensions_of(record, extension),
        base_of(program, state),
        profile,
    )
    return state, resume, Throughput(program, first, peak_flops(prepared.devices), memory)


def state_of(
    prepared: PreparedRun, store: CheckpointStore, reporter: Reporter
) -> tuple[State, int, tuple[SkippedCheckpoint, ...]]:
    """Return the state to start from, its step, and the damaged checkpoints that were skipped.

    The state comes from the newest good checkpoint. A new run starts with random or pretrained weights.
    """
    resolved, program, newest = prepared.resolved, prepared.program, store.newest()
    seed = resolved.job.seed
    if newest is None:
        return program.initial_state(seed, read_file_weights(resolved, program, reporter=reporter)), 0, ()
    require_same_data(resolved, prepared.corpus, newest, store.record(newest).get("data"))
    restored = store.restore_newest(program.saved(program.state))
    assert restored is not None
    state = restored.state
    if has_unsaved_weights(program):
        # Checkpoints have no frozen weights, so they come from the model's files, which may have changed since.
        state = program.resumed(state, seed, read_file_weights(resolved, program, resumes=True))
        require_same_base(store.record(restored.step).get("base"), base_of(program, state), resolved)
    return state, restored.step, restored.skipped
