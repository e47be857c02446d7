"""The steps of a run: from the first to the last, or to a stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from forerun.checkpoint.store import Store
from forerun.config.schema import Job
from forerun.data.feed import Feed
from forerun.data.order.batches import Batches
from forerun.data.order.ledger import Ledger
from forerun.loop.compilation import CompiledStep, no_compilation
from forerun.loop.copies import Copies
from forerun.loop.extension import Extension
from forerun.loop.folder import RunFolder
from forerun.loop.guard import Flights, Guard, Landed
from forerun.loop.pace import Pace
from forerun.loop.placement import Placement
from forerun.loop.saved_files import LEDGER, METRICS, SavedFiles, record_of
from forerun.loop.saving import Saving
from forerun.loop.stored_files import StoredFiles
from forerun.loop.validation import Validation
from forerun.program.build import Program
from forerun.program.state import State
from forerun.supervise.worker import Stopped, Worker
from forerun.track.display import Display
from forerun.track.forwarder import tracking
from forerun.track.metrics import MetricsLog

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """All that the steps of a run need, made ready."""

    job: Job
    program: Program
    step: CompiledStep
    batches: Batches
    pace: Pace
    guard: Guard
    copies: Copies
    validation: Validation
    store: Store
    record: dict[str, Any]  # of every checkpoint
    folder: RunFolder
    before: SavedFiles  # what the checkpoint that the run resumes from says about the folder
    display: Display
    worker: Worker
    extension: Extension | None = None  # another number of steps than before


def run_steps(run: Steps, state: State) -> State:
    """From the first step to the last, or to an announced stop, or until no look at the validation finds better
    weights. Figures are read one step late, so the device never waits for us."""
    job, pace, guard, store, worker = run.job, run.pace, run.guard, run.store, run.worker
    placed = Placement(run.program.batch)
    saving = Saving(job, run.program, pace.first, pace.last, run.display.say, run.display.warn)

    def report(landed: Landed) -> None:
        number = landed.number
        run.copies.require_equal(number)
        worker.pulse.step(number)
        require_no_compilation(number)
        if ledger is not None:
            ledger.write(number, run.batches.examples_at(number - 1), skipped=landed.left_out)
        if landed.warning:
            run.display.warn(landed.warning)
        if landed.figures is None:
            pace.left_out(number)
            log(number, landed.row())
            return
        pace.done(number, landed.figures, feed.waited_seconds)
        if number % job.log_every == 0 or number == pace.last or landed.refused:
            log(number, pace.figures() | landed.row())
        run.display.step(pace.view())

    def validate(number: int, state: State) -> None:
        look = run.validation.look(number, state, worker)
        if look is not None:
            log(number, look.figures)
            run.display.say(look.said(run.validation.best))
        pace.resume()

    def keep(number: int, state: State) -> None:
        with saving.timed(number, lambda: store.save_seconds):
            run.copies.prove(number, state)
            files = record_of(job, number, guard.skips.known, metrics, ledger)
            record = {**run.record, **run.validation.record(number, pace.loss), **files}
            attach = None
            if stored is not None:
                record, attach = record | stored.record(), stored.attach()
            store.save(number, run.program.saved(state), record, attach)

    def log(number: int, figures: dict[str, Any]) -> None:
        if metrics is not None:
            metrics.write(number, **figures)

    with (
        metrics_of(run) as metrics,
        ledger_of(run) as ledger,
        Feed(run.batches, placed, pace.first, pace.last, feeders=job.data.feeders) as feed,
        no_compilation() as require_no_compilation,
    ):
        outside = isinstance(run.folder.checkpoints(job), str)  # a machine that has only them must find the files too
        stored = StoredFiles(run.folder, run.before, {METRICS: metrics, LEDGER: ledger}) if outside else None
        flights = Flights(guard, run.step, lambda number: placed(run.batches.batch_at(number - 1)), jax.device_get)
        number = pace.first
        if run.validation.owed(number, pace.last):
            validate(number, state)
            if saving.replaces(number):  # it could not be judged
                keep(number, state)
        if run.extension is not None and pace.first < pace.last:
            log(pace.first + 1, run.extension.figures)  # removed with that step if it is repeated, and written again
        pace.start()
        for number, batch in enumerate(until_stopped(feed, run), pace.first + 1):
            state = flights.start(state, number, batch)
            store.check()
            run.copies.look(number, state)
            save = saving.due(number)
            look = run.validation.due(number, pace.last)
            while len(flights) > (0 if save or look else 1):
                state, landed = flights.land(state)
                report(landed)
            if look:
                validate(number, state)
            if (save or run.validation.exhausted) and (guard.trusts_state or number == pace.last):
                keep(number, state)
                worker.stop.save_seconds = store.save_seconds  # of the one before
            saving.after(number, pace.step_seconds)
        while len(flights):  # there is something left only after an announced stop
            state, landed = flights.land(state)
            report(landed)
        if saving.saved < number < pace.last and guard.trusts_state and worker.stop.save:
            keep(number, state)
        store.wait(worker.stop.remaining_seconds())
    return state


def until_stopped(feed: Iterable[T], run: Steps) -> Iterator[T]:
    """The batches, until all hosts have agreed to stop, or nothing better is to be expected."""
    batches = iter(feed)
    while not run.validation.exhausted:
        try:
            with run.worker.pulse.waiting("data"):
                batch = next(batches)
        except (StopIteration, Stopped):
            return
        if not run.worker.stop.go():
            return
        yield batch


@contextmanager
def metrics_of(run: Steps) -> Iterator[MetricsLog | None]:
    """Open the metrics and the trackers that read them, on the host that writes for all."""
    if not run.worker.first:
        yield None
        return
    path, pace, tell = run.folder.metrics, run.pace, run.display.warn
    with (
        MetricsLog(path, resume_at=pace.first, seals=run.before.seals(METRICS), tell=tell) as log,
        tracking(run.job, path, pace.last, tell),
    ):
        yield log


@contextmanager
def ledger_of(run: Steps) -> Iterator[Ledger | None]:
    """Open the ledger if the job asks for one, on the host that writes for all."""
    if not run.job.data.ledger or not run.worker.first:
        yield None
        return
    seals = run.before.seals(LEDGER)
    with Ledger(run.folder.ledger, run.pace.first + 1, seals=seals, tell=run.display.warn) as ledger:
        yield ledger
