"""The state that a run starts from, and the checks of everything that it depends on before the first step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forerun.checkpoint.reader import Reader, SkippedCheckpoint
from forerun.checkpoint.store import CheckpointStore
from forerun.data.corpus import Corpus
from forerun.errors import StorageError, UserError
from forerun.hardware.device_memory import DeviceMemory
from forerun.program.build import Program
from forerun.program.state import State
from forerun.reporter import Reporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.extension import extension_of, extensions_of, require_steps_left
from forerun.run.guard import guard_of
from forerun.run.prepared_run import PreparedRun, ResumePoint
from forerun.run.profile_hook import still_ahead
from forerun.run.run_devices import local_devices, peak_flops
from forerun.run.throughput import Throughput
from forerun.run_folder.run_folder import require_usable
from forerun.run_folder.stored_files import saved_files
from forerun.storage.address import Address
from forerun.storage.folder import LocalFolder
from forerun.storage.retries import RetrySchedule
from forerun.supervise.worker import Worker
from forerun.track.backends.job_trackers import trackers_of
from forerun.trained_model.base_weights import (
    base_of,
    has_unsaved_weights,
    read_file_weights,
    require_same_base,
    require_weights,
)
from forerun.trained_model.peft_folder import require_adapter
from forerun.units import KIB, Bytes

_BLOCK_BYTES = 4 * KIB
_FIXED_BYTES = 24 * KIB  # files that every save has, rounded up to blocks
_LEAF_BYTES = 700  # metadata of one array, in the files of Orbax and in the commit record


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


# ---- Checks before the data is read, and before the compilation: both can take minutes ----
#
# All errors that follow from the job, the data or the run's folder are found here or earlier. `resolve_model` and
# `with_data` make the checks that need no run folder, also for `forerun check` and `forerun plan`.


def check_before_data(resolved: ResolvedJob, worker: Worker) -> None:
    """Raise a `UserError` if the run's folder cannot be written, or if a tracker is not installed."""
    if worker.first:
        require_usable(resolved.job)
    trackers_of(resolved.job.track)


def check_before_compile(resolved: ResolvedJob, program: Program, corpus: Corpus, checkpoints: Path | str) -> None:
    """Raise a `UserError` for inputs that would otherwise fail after the compilation.

    - The disk has too little space for the checkpoints.
    - The teacher has no weights.
    - The initial adapter does not match the model.
    - The run would resume with other data. Preference data is compared later, because its digest includes the results
      of the reference model.
    """
    job = resolved.job
    kept = job.checkpoint.keep + job.checkpoint.keep_best
    require_disk_space(checkpoints, needed_bytes(program.saved(program.state), kept))
    if resolved.step_teacher is not None:
        require_weights(resolved.step_teacher)
    reader = Reader(checkpoints, RetrySchedule())
    newest = reader.newest()
    start = job.method.initial_adapter
    if newest is None and start is not None:
        require_adapter(Path(start), resolved, program.method.objective.own(program.state.params))
    if newest is not None and not job.method.data_is_pairs:
        require_same_data(resolved, corpus, newest, reader.record(newest).get("data"))


def require_same_data(resolved: ResolvedJob, corpus: Corpus, step: int, before: object) -> None:
    """Raise unless the data is the same as that of the checkpoint at `step`, whose digest was `before`."""
    if before != corpus.digest:
        same_rows = isinstance(before, str) and before.partition(" ")[0] == corpus.digest.partition(" ")[0]
        restored = "data.shuffle" if same_rows else "data"
        raise UserError(
            "E-RUN-035",
            f"the data is not what the checkpoint of step {step} was trained on",
            why=f"{resolved.job.data.where}: digest {corpus.digest} now, {before} then",
            fix=f"restore the original {restored}, or start over with --fresh (the old folder is kept, renamed)",
        )


def saved_bytes(like: Any) -> Bytes:
    """Return the size of one save of the tree. Arrays are not compressed, and only one host writes each piece."""
    leaves = jax.tree.leaves(like)
    return Bytes(_FIXED_BYTES + sum(_LEAF_BYTES + _leaf_bytes(leaf) for leaf in leaves))


def needed_bytes(like: Any, keep: int) -> Bytes:
    """Return the space for `keep` checkpoints and for the next one, which is written before an old one is removed."""
    return Bytes((keep + 1) * saved_bytes(like))


def require_disk_space(folder: Path | str, needed: int) -> None:
    """Raise StorageError if the disk of `folder` has less than `needed` bytes.

    Space that existing checkpoints in the folder use counts as free, because new ones replace them. A bucket has no
    limit.
    """
    if Address.of(folder).is_remote:
        return
    storage = LocalFolder(Path(folder).resolve())
    free, held = storage.free_bytes(), storage.used_bytes(_BLOCK_BYTES)
    if free + held < needed:
        raise StorageError(
            "E-CHECKPOINT-009",
            f"the checkpoints of this run need {Bytes(needed)}, but only {Bytes(free + held)} can be used",
            why=f"{storage.address}: {Bytes(free)} free, {Bytes(held)} used by its checkpoints",
            fix=f"free {Bytes(needed - free - held)} there, keep fewer (checkpoint.keep=1), or use another disk "
            "(runs=/path)",
        )


def _leaf_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * int(jnp.dtype(leaf.dtype).itemsize)
