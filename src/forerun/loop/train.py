"""`forerun train`, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from forerun.checkpoint.reader import Skipped
from forerun.checkpoint.retention import Retention
from forerun.checkpoint.room import needed_bytes, require_room
from forerun.checkpoint.store import Store
from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.feed import preload
from forerun.data.order.batches import Batches
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import Chosen, choose
from forerun.hardware.mesh import MeshShape, check_model, resolve
from forerun.loop.code import note_code
from forerun.loop.compilation import compile_step, use_cache
from forerun.loop.concrete import concrete
from forerun.loop.copies import copies_of
from forerun.loop.corpus import shown_corpus
from forerun.loop.extension import extension_of, extensions_of, require_steps_left
from forerun.loop.finished import finished_summary
from forerun.loop.folder import open_folder, require_usable
from forerun.loop.given import base_of, given_of, require_matching_weights, require_same_base, rests_on_files
from forerun.loop.guard import guard_of
from forerun.loop.job_warnings import warnings_of
from forerun.loop.pace import Pace
from forerun.loop.placement import Placement
from forerun.loop.preflight import check_before_compile, require_same_data
from forerun.loop.reference import REFERENCE, noted_base, referenced
from forerun.loop.sample import sample_text
from forerun.loop.saved_files import saved_files
from forerun.loop.starting_weights import starting_weights
from forerun.loop.steps import Steps, run_steps
from forerun.loop.stored_files import read_summary, store_summary
from forerun.loop.summary import summary_of
from forerun.loop.taught import taught
from forerun.loop.validation import Validation
from forerun.methods.kept import rounding_told
from forerun.models.registry import model_of
from forerun.nn.spec import count, merge
from forerun.program.build import Program, build, make_mesh
from forerun.program.derive import derive
from forerun.program.state import State
from forerun.supervise.worker import Worker, unattended
from forerun.track.display import Display
from forerun.track.metrics import write_summary
from forerun.track.tracker import trackers_of
from forerun.units import Count


@dataclass(frozen=True)
class Finished:
    summary: dict[str, Any]
    sample: str
    state: State | None  # None if the run had finished before


def train(job: Job, display: Display, *, fresh: bool = False, worker: Worker | None = None) -> Finished | None:
    """Run a job to its end, from its newest checkpoint if it has one; None if the `worker` was asked to stop before."""
    worker = worker or unattended()
    if worker.first:
        require_usable(job)
    use_cache()
    preload()
    worker.initialize_jax()

    # Devices: what is here, and why these.
    chosen = choose(job.device, job.devices)
    display.say(f"device: {chosen.reason}")
    if chosen.warning:
        display.warn(chosen.warning)
    mesh_on(job, chosen)  # an impossible mesh is said before anything is read
    trackers_of(job.track)  # and so is a tracker that is not installed
    if not fresh and (summary := finished_summary(job, display.say)) is not None:
        return Finished(summary, "", None)
    display.say(f"model: {starting_weights(job)}")
    for text in warnings_of(job):
        display.warn(text)

    # Data: read, tokenized, packed into rows of one length.
    worker.pulse.phase("data")
    corpus = shown_corpus(job, display)
    worker.pulse.fact("data digest", corpus.digest)

    require_matching_weights(job)

    # Program: the one that `plan` would compile.
    worker.pulse.phase("compile")
    epochs, job = job.steps is None, concrete(job, corpus)
    if epochs and not fresh and (summary := finished_summary(job, display.say)) is not None:
        return Finished(summary, "", None)
    corpus = taught(job, corpus)
    worker.pulse.fact("data and cache digest", corpus.digest)
    program = program_on(job, chosen, corpus.rows.epoch)
    display.say(described(program))
    for text, is_warning in rounding_told(job):
        (display.warn if is_warning else display.say)(text)
    folder = open_folder(job, fresh=fresh, writes=worker.first, tell=display.warn)
    if worker.first:
        note_code(folder, display.warn)
    checkpoints = folder.checkpoints(job)
    require_room(
        checkpoints, needed_bytes(program.saved(program.state), job.checkpoint.keep + job.checkpoint.keep_best)
    )
    check_before_compile(job, program, corpus, checkpoints)
    step = compile_step(program, display)
    corpus = referenced(job, program, corpus, folder, display, worker)
    batches = batches_of(job, program, corpus)
    copies, validation = copies_of(job, program, display), Validation(job, program, corpus, display)

    # State: fresh, or where the last good checkpoint left it.
    worker.pulse.phase("restore")
    with Store(checkpoints, keep=retention_of(job), tell=told_of_saves(display, worker)) as store:
        with display.phase("state") as phase:
            state, first, passed_over = state_of(job, program, store, corpus, display.warn)
            record = store.record(first) if first else {}
            validation.resume(record, first)
            phase.detail = f"step {first} from {checkpoints}" if first else begun_from(job)
        worker.pulse.fact("checkpoint", f"step {first}")
        for damaged in passed_over:
            display.warn(f"a checkpoint was passed over, its files are not what was saved: {damaged}")

        require_steps_left(job, first, checkpoints)
        extension = extension_of(job, record, first, int(state.step))
        if extension is not None:
            display.warn(extension.said(job.optimizer.schedule))
        extensions = extensions_of(record, extension)

        before = saved_files(store, first)
        if not before.complete:
            display.say("an older version saved this checkpoint: the files of the run are not compared with it")

        # Steps.
        pace = Pace(program, first, peak_flops(chosen))
        steps = Steps(
            job=job,
            program=program,
            step=step,
            batches=batches,
            pace=pace,
            guard=guard_of(job, folder, before, display.warn),
            copies=copies,
            validation=validation,
            store=store,
            record={
                "program": step.hash,
                "data": corpus.digest,
                "base": base_of(program, state),
                REFERENCE: noted_base(folder),
                **extensions,
            },
            folder=folder,
            before=before,
            display=display,
            worker=worker,
            extension=extension,
        )
        try:
            with worker.saving_at_ctrl_c():
                state = run_steps(steps, state)
        finally:
            display.close()
    worker.pulse.phase("finish")
    if (pace.number < pace.last and not validation.exhausted) or validation.owed(pace.number, pace.last):
        display.say(f"stopped as asked after step {pace.number}: the same command goes on from the newest checkpoint")
        return None

    if pace.number < pace.last:
        display.say(f"ended at step {pace.number}: {validation.said}")

    # The end: what came out, in figures and in words.
    summary = {}
    if worker.first:
        done = None if pace.step_seconds else read_summary(folder, pace.number)  # started again, it keeps its figures
        summary = done or summary_of(job, program, step, pace, validation, chosen, folder) | extensions
        if done is None:
            write_summary(folder.summary, summary)
        store_summary(checkpoints, store, folder)
    text = ""
    if job.sample.tokens:
        weights = state.params if state.average is None else merge(state.average, state.params)
        text = sample_text(
            program, program.method.objective.own(weights), corpus.tokenizer, job.sample, job.sequence, job.seed
        )
    return Finished(summary, text, state)


def mesh_on(job: Job, chosen: Chosen) -> MeshShape:
    return resolve(job.mesh.data, job.mesh.fsdp, job.mesh.tp, len(chosen.devices))


def program_on(job: Job, chosen: Chosen, examples: int | None) -> Program:
    """The concrete job's Program on the chosen devices."""
    model, mesh = model_of(job.model), mesh_on(job, chosen)
    check_model(mesh, model.heads, job.batch, job.micro_batch)
    return build(job, model, make_mesh(mesh, chosen.devices), derive(job, mesh, examples))


def batches_of(job: Job, program: Program, corpus: Corpus) -> Batches:
    """Global batch t is a function of the seed and t alone; each host makes the rows that its devices hold."""
    accumulation, held = program.derived.accumulation, Placement(program.batch).held
    return Batches(corpus.rows, seed=job.seed, batch=job.batch, accumulation=accumulation, held=held)


def retention_of(job: Job) -> Retention:
    return Retention(job.checkpoint.keep, job.checkpoint.keep_every, job.checkpoint.keep_best)


def state_of(
    job: Job, program: Program, store: Store, corpus: Corpus, tell: Callable[[str], None]
) -> tuple[State, int, tuple[Skipped, ...]]:
    """Fresh, a pretrained model's, or the newest good checkpoint's; with its step, and what was damaged.

    With other data than before, a resumed run would not be the same run.
    """
    newest = store.newest()
    if newest is None:
        return program.initial_state(job.seed, given_of(job, program, tell=tell)), 0, ()
    require_same_data(job, corpus, newest, store.record(newest).get("data"))
    restored = store.restore_newest(program.saved(program.state))
    assert restored is not None
    state = restored.state
    if rests_on_files(program):
        state = program.resumed(state, job.seed, given_of(job, program, resumes=True))
        require_same_base(store.record(restored.step).get("base"), base_of(program, state), job)
    return state, restored.step, restored.skipped


def begun_from(job: Job) -> str:
    return starting_weights(job)


def told_of_saves(display: Display, worker: Worker) -> Callable[[str], None]:
    """A bucket that is away is told to the user, and to the supervisor, so that waiting for it is no stall."""

    def told(text: str) -> None:
        worker.pulse.phase("save")
        display.warn(text)

    return told


def peak_flops(chosen: Chosen) -> float | None:
    """Of all devices together, if the chip is in the tables."""
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    if chip is None or chip.bf16_flops_per_device is None:
        return None
    return chip.bf16_flops_per_device * len(chosen.devices)


def described(program: Program) -> str:
    derived, specs = program.derived, program.model.specs()
    learning = sum(leaf.size for leaf in jax.tree.leaves(program.learning))
    which = "" if learning == count(specs) else f", {Count(learning)} of them learn"
    return (
        f"program: {Count(count(specs))} parameters{which}, mesh {derived.mesh}, "
        f"{derived.steps} steps of {Count(derived.tokens_per_step)} tokens "
        f"({derived.micro_batch} x {derived.accumulation} x {derived.mesh.data_parallel} sequences), "
        f"attention {program.compute.attention.name}, remat {program.compute.remat.policy}"
    )
