"""`forerun train`, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from forerun.checkpoint.reader import Skipped
from forerun.checkpoint.retention import Retention
from forerun.checkpoint.room import needed_bytes, require_room
from forerun.checkpoint.store import Store
from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.feed import Feed, preload
from forerun.data.order.batches import Batches
from forerun.data.order.ledger import Ledger
from forerun.errors import UserError
from forerun.hardware.chips import chip_of_device_kind
from forerun.hardware.devices import Chosen, choose
from forerun.hardware.mesh import MeshShape, check_model, resolve
from forerun.loop.compilation import CompiledStep, compile_step, no_compilation, use_cache
from forerun.loop.concrete import concrete
from forerun.loop.corpus import shown_corpus
from forerun.loop.folder import RunFolder, open_folder
from forerun.loop.loaded import pretrained_params
from forerun.loop.pace import Pace
from forerun.loop.sample import sample_text
from forerun.loop.summary import summary_of
from forerun.models.pretrained import is_checkpoint
from forerun.models.registry import model_of
from forerun.nn.spec import count, merge
from forerun.objectives.batch import Batch
from forerun.program.build import Program, build, make_mesh
from forerun.program.derive import derive
from forerun.program.state import Metrics, State
from forerun.supervise.worker import Stopped, Worker, unattended
from forerun.track.display import Display
from forerun.track.metrics import MetricsLog, write_summary
from forerun.units import Count

T = TypeVar("T")


@dataclass(frozen=True)
class Finished:
    summary: dict[str, Any]
    sample: str
    state: State


def train(job: Job, display: Display, *, fresh: bool = False, worker: Worker | None = None) -> Finished | None:
    """Run a job to its end, from its newest checkpoint if it has one; None if the `worker` was asked to stop before."""
    worker = worker or unattended()
    use_cache()
    preload()

    # Devices: what is here, and why these.
    chosen = choose(job.device, job.devices)
    display.say(f"device: {chosen.reason}")
    if chosen.warning:
        display.warn(chosen.warning)
    mesh_on(job, chosen)  # an impossible mesh is said before anything is read

    # Data: read, tokenized, packed into rows of one length.
    worker.pulse.phase("data")
    corpus = shown_corpus(job, display)

    # Program: the one that `plan` would compile.
    worker.pulse.phase("compile")
    job = concrete(job, corpus)
    program = program_on(job, chosen, corpus.rows.epoch)
    batches = batches_of(job, program, corpus)
    display.say(described(program))
    folder = open_folder(job, fresh=fresh)
    require_room(folder.checkpoints, needed_bytes(program.state, job.checkpoint.keep + job.checkpoint.keep_best))
    step = compile_step(program, display)

    # State: fresh, or where the last good checkpoint left it.
    worker.pulse.phase("restore")
    with closing(Store(folder.checkpoints, keep=retention_of(job))) as store:
        with display.phase("state") as phase:
            state, first, passed_over = state_of(job, program, store, corpus)
            phase.detail = f"step {first} from {folder.checkpoints}" if first else begun_from(job)
        for damaged in passed_over:
            display.warn(f"a checkpoint was passed over, its files are not what was saved: {damaged}")

        # Steps.
        pace = Pace(program, first, peak_flops(chosen))
        try:
            record = {"program": step.hash, "data": corpus.digest}
            state = run_steps(job, program, step, state, batches, pace, store, record, folder, display, worker)
        finally:
            display.close()
    worker.pulse.phase("finish")
    if pace.number < pace.last:
        display.say(f"stopped as asked after step {pace.number}: the same command goes on from the newest checkpoint")
        return None

    # The end: what came out, in figures and in words.
    summary = summary_of(job, program, step, pace, chosen, folder)
    if pace.step_seconds or not folder.summary.exists():  # a finished run that is started again keeps its figures
        write_summary(folder.summary, summary)
    text = ""
    if job.sample.tokens:
        weights = state.params if state.average is None else merge(state.average, state.params)
        text = sample_text(program, weights, corpus.tokenizer, job.sample, job.sequence, job.seed)
    return Finished(summary, text, state)


def mesh_on(job: Job, chosen: Chosen) -> MeshShape:
    return resolve(job.mesh.data, job.mesh.fsdp, job.mesh.tp, len(chosen.devices))


def program_on(job: Job, chosen: Chosen, examples: int | None) -> Program:
    """The concrete job's Program on the chosen devices."""
    model, mesh = model_of(job.model), mesh_on(job, chosen)
    check_model(mesh, model.heads, job.batch, job.micro_batch)
    return build(job, model, make_mesh(mesh, chosen.devices), derive(job, mesh, examples))


def batches_of(job: Job, program: Program, corpus: Corpus) -> Batches:
    """Global batch t is a function of the seed and t alone; each host makes its own part of it."""
    part = (jax.process_index(), jax.process_count())
    accumulation = program.derived.accumulation
    return Batches(corpus.rows, seed=job.seed, batch=job.batch, accumulation=accumulation, part=part)


def retention_of(job: Job) -> Retention:
    return Retention(job.checkpoint.keep, job.checkpoint.keep_every, job.checkpoint.keep_best)


def state_of(job: Job, program: Program, store: Store, corpus: Corpus) -> tuple[State, int, tuple[Skipped, ...]]:
    """Fresh, a pretrained model's, or the newest good checkpoint's; with its step, and what was damaged.

    With other data than before, a resumed run would not be the same run.
    """
    newest = store.newest()
    if newest is None and is_checkpoint(job.model):
        return program.state_with(pretrained_params(job.model, program.state.params)), 0, ()
    if newest is None:
        return program.initial_state(job.seed), 0, ()
    before = store.record(newest).get("data")
    if before != corpus.digest:
        raise UserError(
            f"the data is not what the checkpoint of step {newest} was trained on",
            why=f"{job.data.where}: digest {corpus.digest} now, {before} then",
            fix="put the text back as it was, or start over with --fresh (the old folder is kept, renamed)",
        )
    restored = store.restore_newest(program.state)
    assert restored is not None
    return restored.state, restored.step, restored.skipped


def begun_from(job: Job) -> str:
    return f"weights of {job.model.name}" if is_checkpoint(job.model) else f"fresh, seed {job.seed}"


def run_steps(
    job: Job,
    program: Program,
    step: CompiledStep,
    state: State,
    batches: Batches,
    pace: Pace,
    store: Store,
    record: dict[str, str],
    folder: RunFolder,
    display: Display,
    worker: Worker,
) -> State:
    """From the first step to the last, or to an announced stop. Figures are read one step late, so the device never
    waits for us."""

    def placed(batch: Batch[np.ndarray[Any, Any]]) -> Batch[jax.Array]:
        return jax.tree.map(on_devices, program.batch, batch)

    def report(number: int, metrics: Metrics) -> None:
        pace.done(number, jax.device_get(metrics), feed.waited_seconds)
        worker.pulse.step(number)
        require_no_compilation(number)
        if number % job.log_every == 0 or number == pace.last:
            log.write(number, **pace.figures())
        display.step(pace.view())
        pace.require_finite()

    with (
        closing(MetricsLog(folder.metrics, resume_at=pace.first)) as log,
        ledger_of(job, folder, pace.first) as write_down,
        Feed(batches, placed, pace.first, pace.last, feeders=job.data.feeders) as feed,
        no_compilation() as require_no_compilation,
    ):
        waiting: list[tuple[int, Metrics]] = []
        number = pace.first
        pace.start()
        for number, batch in enumerate(until_stopped(feed, worker), pace.first + 1):
            state, metrics = step(state, batch)
            write_down(number, batches)
            waiting.append((number, metrics))
            store.check()
            save = number % job.checkpoint.every == 0 or number == pace.last
            while len(waiting) > (0 if save else 1):
                report(*waiting.pop(0))
            if save:
                store.save(number, state, {**record, "loss": pace.loss})
                worker.stop.save_seconds = store.save_seconds  # of the one before
        while waiting:  # there is something left only after an announced stop
            report(*waiting.pop(0))
        if number < pace.last and number % job.checkpoint.every and number > pace.first and worker.stop.save:
            store.save(number, state, {**record, "loss": pace.loss})
        store.wait()
    return state


def until_stopped(feed: Iterable[T], worker: Worker) -> Iterator[T]:
    """The batches, until all hosts have agreed to stop."""
    batches = iter(feed)
    while True:
        try:
            with worker.pulse.waiting("data"):
                batch = next(batches)
        except (StopIteration, Stopped):
            return
        if not worker.stop.go():
            return
        yield batch


@contextmanager
def ledger_of(job: Job, folder: RunFolder, first: int) -> Iterator[Callable[[int, Batches], None]]:
    """Writes the example ids of a step down, if the job wants a ledger; one host writes for all."""
    if not job.data.ledger or jax.process_index() != 0:
        yield lambda number, batches: None
        return
    with Ledger(folder.ledger, first + 1) as ledger:
        yield lambda number, batches: ledger.write(number, batches.examples_at(number - 1))


def on_devices(like: jax.ShapeDtypeStruct, part: np.ndarray[Any, Any]) -> jax.Array:
    """This host's part of an array, laid out as the program wants it."""
    return jax.make_array_from_process_local_data(like.sharding, part, like.shape)


def peak_flops(chosen: Chosen) -> float | None:
    """Of all devices together, if the chip is in the tables."""
    chip = chip_of_device_kind(chosen.devices[0].device_kind)
    if chip is None or chip.bf16_flops_per_device is None:
        return None
    return chip.bf16_flops_per_device * len(chosen.devices)


def described(program: Program) -> str:
    derived, specs = program.derived, program.model.specs()
    return (
        f"program: {Count(count(specs))} parameters, mesh {derived.mesh}, "
        f"{derived.steps} steps of {Count(derived.tokens_per_step)} tokens "
        f"({derived.micro_batch} x {derived.accumulation} x {derived.mesh.data_parallel} sequences), "
        f"attention {program.compute.attention.name}, remat {program.compute.remat.policy}"
    )
