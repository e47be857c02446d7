"""The order of events in the training loop: what happens between the dispatch of a step and the next one.

Recording doubles note each event of a short run. The expected lists are written out: they do not come from the loop.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from forerun.checkpoint.store import CheckpointStore
from forerun.config.load import load
from forerun.config.schema import Job
from forerun.data.order.ledger import Ledger
from forerun.objectives.batch import Batch
from forerun.program.state import Metrics
from forerun.reporter import LineReporter, StepView
from forerun.run import replicas as copies_module
from forerun.run import save_schedule as saving_module
from forerun.run import train as loop
from forerun.run.throughput import Throughput
from forerun.supervise.protocol.channel import NullChannel
from forerun.supervise.worker import ProgressReporter, Worker
from forerun.supervise.worker_stop import Stop
from forerun.track.metrics import MetricsLog

MakeJob = Callable[..., Job]
Events = list[str]


class RecordingStop(Stop):
    """Announces a stop before unit `stop_after` + 1, with time for a save."""

    def __init__(self, events: Events, stop_after: int | None) -> None:
        self._events, self._stop_after = events, stop_after
        super().__init__(NullChannel(), leave=lambda: None)

    def go(self) -> bool:
        if self.units == self._stop_after:
            self.here(30.0, save=True)
        goes = super().go()
        self._events.append("go" if goes else "stop")
        return goes


class RecordingPulse(ProgressReporter):
    def __init__(self, events: Events, stop: Stop) -> None:
        super().__init__(NullChannel(), stop)
        self._events = events

    def phase(self, name: str) -> None:
        self._events.append(f"phase {name}")

    def step(self, number: int) -> None:
        self._events.append(f"pulse {number}")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        self._events.append(f"wait {what}")
        yield


class RecordingDisplay(LineReporter):
    def __init__(self, events: Events) -> None:
        super().__init__(io.StringIO(), clock=time.monotonic)
        self._events = events

    def step(self, view: StepView) -> None:
        self._events.append(f"show {view.step}")

    def info(self, text: str) -> None:
        self._events.append(f"say {text.split()[0]}")

    def warn(self, text: str) -> None:
        self._events.append(f"warn {text.split()[0]}")


class Run:
    """Trains with recording doubles; `events` has those from the first one of the steps on."""

    def __init__(self, patch: pytest.MonkeyPatch, bad_steps: tuple[int, ...] = ()) -> None:
        self.events: Events = []
        self._patch_files(patch)
        self._patch_devices(patch)
        patch.setattr(saving_module, "best_interval", lambda *args, **times: 100)
        healthy = loop.batches_of

        class Spoiled:
            def __init__(self, batches: Any) -> None:
                self.examples_at, self._batches = batches.examples_at, batches

            def batch_at(self, index: int) -> Batch[Any]:
                batch = self._batches.batch_at(index)
                return replace(batch, weights=np.full_like(batch.weights, np.nan)) if index + 1 in bad_steps else batch

        patch.setattr(loop, "batches_of", lambda *given: Spoiled(healthy(*given)))

    def _patch_files(self, patch: pytest.MonkeyPatch) -> None:
        events, write, save, wait, check = (
            self.events,
            MetricsLog.write,
            CheckpointStore.save,
            CheckpointStore.wait,
            CheckpointStore.check,
        )
        note, exclude, start = Ledger.write, Throughput.exclude, Throughput.start

        def metrics(log: MetricsLog, step: int, **row: Any) -> None:
            events.append(f"metrics {step} {next(iter(row))}")
            write(log, step, **row)

        def ledger(log: Ledger, step: int, examples: Any, *, skipped: str | None = None) -> None:
            events.append(f"ledger {step}" + (" skipped" if skipped else ""))
            note(log, step, examples, skipped=skipped)

        def saved(store: CheckpointStore, step: int, state: Any, record: Any, attach: Any = None) -> None:
            loss = "no loss" if record["loss"] is None else "loss"
            events.append(f"save {step} {loss}, metrics to {record['metrics']['step']}")
            save(store, step, state, record, attach)

        def checked(store: CheckpointStore) -> None:
            events.append("check store")
            check(store)

        def waited(store: CheckpointStore, seconds: float | None = None) -> bool:
            events.append("wait store" + ("" if seconds is None else " for a limited time"))
            return wait(store, seconds)

        def excluded(throughput: Throughput) -> None:
            events.append("exclude time")
            exclude(throughput)

        def started(throughput: Throughput) -> None:
            events.append("start clock")
            start(throughput)

        for owner, name, double in (
            (MetricsLog, "write", metrics),
            (Ledger, "write", ledger),
            (CheckpointStore, "save", saved),
            (CheckpointStore, "check", checked),
            (CheckpointStore, "wait", waited),
            (Throughput, "exclude", excluded),
            (Throughput, "start", started),
        ):
            patch.setattr(owner, name, double)

    def _patch_devices(self, patch: pytest.MonkeyPatch) -> None:
        events, get, compile_step = self.events, jax.device_get, loop.compile_step
        compiled_fingerprints = copies_module.compiled_fingerprints

        def device_get(tree: Any) -> Any:
            if isinstance(tree, Metrics):
                events.append("read metrics")
            elif isinstance(tree, list):
                events.append("read validation")
            elif getattr(tree, "dtype", None) == np.uint32:
                events.append("read fingerprints")
            return get(tree)

        class Compiled:
            def __init__(self, step: Any) -> None:
                self._step, self.hash, self.cached = step, step.hash, step.cached

            def __call__(self, state: Any, batch: Any) -> Any:
                events.append("dispatch")
                return self._step(state, batch)

        def fingerprints(mesh: Any, like: Any) -> Any:
            run = compiled_fingerprints(mesh, like)

            def recorded(state: Any) -> Any:
                events.append("fingerprint")
                return run(state)

            return recorded

        patch.setattr(jax, "device_get", device_get)
        patch.setattr(loop, "compile_step", lambda *given: Compiled(compile_step(*given)))
        patch.setattr(copies_module, "compiled_fingerprints", fingerprints)

    def train(self, job: Job, stop_after: int | None = None) -> list[Events]:
        """Return the events after the restore in lists: before the first step, of each step, and after the last."""
        self.events.clear()
        stop = RecordingStop(self.events, stop_after)
        pulse = RecordingPulse(self.events, stop)
        worker = Worker(attempt=0, index=0, hosts=1, coordinator="", pulse=pulse, stop=stop)
        loop.train(job, RecordingDisplay(self.events), worker=worker)
        events = self.events[self.events.index("phase restore") + 1 :]
        starts = [0, *(n for n, event in enumerate(events) if event == "wait data"), len(events)]
        return [events[begin:end] for begin, end in pairwise(starts)]


@pytest.fixture
def documents(tmp_path: Path, job_file: Path) -> MakeJob:
    """Return a job on two devices with everything that happens between steps; an evaluation has two batches."""
    (tmp_path / "rows").mkdir()
    lines = [f'{{"text": "number {n}: {"tick " * (n % 7 + 1)}and {n * n} tocks"}}' for n in range(40)]
    (tmp_path / "rows" / "clock.jsonl").write_text("\n".join(lines))
    keys = [
        f"runs={tmp_path / 'runs'}",
        f"data.path={tmp_path / 'rows'}",
        f"data.store={tmp_path / 'store'}",
        "data.validation=0.3",
        "data.packing=whole",
        "data.ledger=true",
        "sequence=80",
        "validation.every=2",
        "validation.batches=2",
        "batch=4",
        "checkpoint.every=3",
        "devices=2",
        "mesh.data=2",
        "mesh.fsdp=1",
        "guard.compare_every=2",
        "log_every=1",
    ]
    return lambda *overrides: load(job_file, [*keys, *overrides]).job


NEXT = ["wait data", "go", "dispatch", "check store"]
PROVE = ["fingerprint", "read fingerprints"]
START = ["say state", "say state", "start clock"]
END = ["wait data", "wait store", "phase finish"]


def recorded(step: int, *, compared: bool = False) -> Events:
    """Return the events of a step whose metrics are read; `compared` if its replicas were fingerprinted."""
    fingerprints = ["read fingerprints"] if compared else []
    return [
        "read metrics",
        *fingerprints,
        f"pulse {step}",
        f"ledger {step}",
        f"metrics {step} loss",
        f"show {step}",
    ]


def evaluated(step: int) -> Events:
    return [
        "phase evaluate",
        "go",
        "go",
        "read validation",
        f"metrics {step} validation_loss",
        "say validation",
        "exclude time",
    ]


def saved(step: int, loss: str = "loss") -> Events:
    """Return the events of a checkpoint: replicas are compared first, and the metrics file is complete."""
    return [*PROVE, f"save {step} {loss}, metrics to {step}"]


def test_metrics_are_read_one_step_late_unless_a_hook_needs_the_state(
    documents: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluate every 2, save every 3 and compare every 2 of 6 steps."""
    assert Run(monkeypatch).train(documents()) == [
        START,
        NEXT,
        [*NEXT, "fingerprint", *recorded(1), *recorded(2, compared=True), *evaluated(2)],
        [*NEXT, *recorded(3), *saved(3, "no loss")],
        [*NEXT, "fingerprint", *recorded(4, compared=True), *evaluated(4)],
        NEXT,
        [*NEXT, "fingerprint", *recorded(5), *recorded(6, compared=True), *evaluated(6), *saved(6)],
        END,
    ]


def test_a_stop_records_the_step_in_flight_and_saves_and_a_resumed_run_starts_there(
    documents: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluate at steps 5 and 7. The interval of `auto` is reported after the evaluation of step 5."""
    job = documents("steps=7", "validation.every=5", "checkpoint.every=auto", "guard.compare_every=100")
    run = Run(monkeypatch)
    assert run.train(job, stop_after=6 + 2) == [
        START,
        NEXT,
        [*NEXT, *recorded(1)],
        [*NEXT, *recorded(2)],
        [*NEXT, *recorded(3)],
        [*NEXT, *recorded(4), *recorded(5), *evaluated(5), "say checkpoint"],
        NEXT,
        [
            *["wait data", "stop", *recorded(6), *saved(6, "no loss"), "wait store for a limited time"],
            *["phase finish", "say stopped"],
        ],
    ]
    assert run.train(job) == [START, [*NEXT, *recorded(7), *evaluated(7), *saved(7)], END]


def test_an_evaluation_that_a_stop_interrupts_is_repeated_before_the_first_step(
    documents: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has no loss at first and is saved again with it. More steps then extend the run."""
    job = documents("checkpoint.every=2", "steps=5")
    run = Run(monkeypatch)
    compared = ["fingerprint", *recorded(1), *recorded(2, compared=True)]
    assert run.train(job, stop_after=4 + 2 + 1) == [
        START,
        NEXT,
        [*NEXT, *compared, *evaluated(2), *saved(2)],
        NEXT,
        [
            *[*NEXT, "fingerprint", *recorded(3), *recorded(4, compared=True)],
            *["phase evaluate", "go", "stop", "exclude time", *saved(4, "no loss")],
        ],
        ["wait data", "stop", "wait store for a limited time", "phase finish", "say stopped"],
    ]
    assert run.train(job) == [
        ["say state", "say state", *evaluated(4), *saved(4), "start clock"],
        [*NEXT, *recorded(5), *evaluated(5), *saved(5)],
        END,
    ]
    assert run.train(documents("checkpoint.every=2", "steps=6")) == [
        ["say state", "say state", "warn steps", "metrics 6 steps_before", "start clock"],
        [*NEXT, "fingerprint", *recorded(6, compared=True), *evaluated(6), *saved(6)],
        END,
    ]


def test_a_checkpoint_waits_for_the_step_after_a_skipped_one(
    documents: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is bad twice: it is skipped, and the checkpoint that was due then is saved after step 4."""
    job = documents("steps=5", "validation.every=5", "guard.compare_every=100")
    skipped = ["read metrics", "dispatch", "read metrics", "pulse 3", "ledger 3 skipped", "warn step"]
    assert Run(monkeypatch, bad_steps=(3,)).train(job) == [
        START,
        NEXT,
        [*NEXT, *recorded(1)],
        [*NEXT, *recorded(2), *skipped, "metrics 3 skipped"],
        [*NEXT, *recorded(4), *saved(4, "no loss")],
        [*NEXT, *recorded(5), *evaluated(5), *saved(5)],
        END,
    ]


def test_early_stopping_saves_though_no_checkpoint_is_due(documents: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that do not move have the same loss at steps 2 and 4. The next batch is not waited for."""
    constant = ("optimizer.lr=1e-30", "optimizer.warmup=0", "optimizer.schedule=constant")
    job = documents(*constant, "steps=9", "validation.patience=1", "checkpoint.every=100", "guard.compare_every=100")
    assert Run(monkeypatch).train(job) == [
        START,
        NEXT,
        [*NEXT, *recorded(1), *recorded(2), *evaluated(2)],
        NEXT,
        [
            *[*NEXT, *recorded(3), *recorded(4), *evaluated(4), *saved(4)],
            *["wait store", "phase finish", "say ended"],
        ],
    ]
