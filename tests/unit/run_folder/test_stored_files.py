"""A machine that has only the checkpoints of a run gets the run's metrics, ledger and summary from them."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from recording_reporter import RecordingReporter

from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.data.order.ledger import Ledger, entries
from forerun.reporter import SILENT, LineReporter, Reporter
from forerun.run import train as loop
from forerun.run_folder.run_folder import RunFolder
from forerun.run_folder.stored_files import (
    LEDGER,
    METRICS,
    StoredFiles,
    read_summary,
    record_of,
    restore_files,
    saved_files,
    store_summary,
)
from forerun.track.event_log import EventLog, read_events
from forerun.track.metrics import MetricsLog, read_metrics, write_summary

MakeJob = Callable[..., Job]
STATE = {"x": jnp.ones(4)}
EVERY = 2


def train_to(job: Job, folder: RunFolder, checkpoints: str, last: int, reporter: Reporter, machine: str) -> int:
    """Stand in for a process that trains to the step `last`, with a save every second step. Return its first step."""
    restore_files(checkpoints, folder, reporter)
    with CheckpointStore(checkpoints, keep=2) as store:
        first = store.newest() or 0
        before = saved_files(store, first)
        with (
            MetricsLog(folder.metrics, resume_at=first, seals=before.seals(METRICS), reporter=reporter) as metrics,
            Ledger(folder.ledger, first + 1, seals=before.seals(LEDGER), reporter=reporter) as ledger,
        ):
            events = EventLog(folder.events, reporter)
            events.write({"event": "start", "session": events.session, "machine": machine})
            stored = StoredFiles(folder, before, {METRICS: metrics, LEDGER: ledger}, events)
            for step in range(first + 1, last + 1):
                metrics.write(step, loss=step / 4, machine=machine)
                ledger.write(step, [(0, step)])
                events.write({"event": "time", "session": events.session, "step": step})
                if step % EVERY == 0:
                    record = record_of(job, step, {}, metrics, ledger) | stored.record(step)
                    store.save(step, STATE, record, stored.attach())
            store.wait()
            events.close()
    return first


@pytest.fixture
def run(make_job: MakeJob, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    job = make_job()

    def run(machine: str, last: int) -> tuple[int, list[str]]:
        told: list[str] = []
        return train_to(
            job, RunFolder(tmp_path / machine), str(tmp_path / "shared"), last, RecordingReporter(told), machine
        ), told

    return run


def steps_of(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["machine"]) for row in read_metrics(folder / "metrics.jsonl")]


def test_another_machine_has_every_step_once(run: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    """Machine `a` gets to step 7 and saves step 6; `b` repeats step 7; then `a`, whose step 7 is obsolete, returns."""
    assert run("a", 7) == (0, [])
    first, told = run("b", 9)
    assert (first, len(told)) == (6, 1)
    by_a, by_b = [(step, "a") for step in range(1, 7)], [(7, "b"), (8, "b"), (9, "b")]
    assert steps_of(tmp_path / "b") == by_a + by_b
    assert list(entries(tmp_path / "b" / "ledger.jsonl")) == [(step, [(0, step)]) for step in range(1, 10)]

    old = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    first, told = run("a", 9)
    assert first == 8
    assert steps_of(tmp_path / "a") == [*by_a, (7, "b"), (8, "b"), (9, "a")]
    assert (tmp_path / "a" / "metrics.jsonl.replaced-1").read_bytes() == old, "nothing is removed or mixed silently"
    # The lines of the ledger do not depend on the machine, so the old file is a part of the new one.
    assert not (tmp_path / "a" / "ledger.jsonl.replaced-1").exists()
    assert list(entries(tmp_path / "a" / "ledger.jsonl")) == [(step, [(0, step)]) for step in range(1, 10)]


def test_another_machine_continues_the_history(run: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    """Events are not removed with the steps that are run again. A copy ends with the events of its checkpoint."""
    run("a", 7)
    run("b", 8)
    first = [(1, "start", None), *((1, "time", step) for step in range(1, 7))]
    second = [(2, "start", None), (2, "time", 7), (2, "time", 8)]
    assert events_of(tmp_path / "b") == first + second
    assert events_of(tmp_path / "a") == [*first, (1, "time", 7)]
    run("b", 9)  # the file has grown since the checkpoint of step 8, and it is kept
    assert events_of(tmp_path / "b") == [*first, *second, (3, "start", None), (3, "time", 9)]


def events_of(folder: Path) -> list[tuple[int, str, int | None]]:
    events = read_events(folder / "events.jsonl")
    return [(event["session"], event["event"], event.get("step")) for event in events]


def test_a_local_file_that_is_what_the_checkpoint_recorded_is_kept(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    run("a", 7)
    shutil.rmtree(tmp_path / "shared" / "files")  # not even read
    assert run("a", 8) == (6, [])
    assert steps_of(tmp_path / "a") == [(step, "a") for step in range(1, 9)]


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_copy_is_reported_and_not_used(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path, damage: str
) -> None:
    run("a", 6)
    # Parts are merged by size, and times in the rows change their size: an older save may have left another first part.
    for part in list((tmp_path / "shared" / "files").glob("*-metrics-0")):
        content = part.read_bytes()
        part.unlink()
        if damage == "changed":
            part.write_bytes(content.replace(b"0.25", b"0.24"))
    first, told = run("b", 8)
    assert first == 6
    assert steps_of(tmp_path / "b") == [(7, "b"), (8, "b")]
    assert sum(str(tmp_path / "b" / "metrics.jsonl") in line for line in told) == 2, "the copy and the loss"
    assert len(list(entries(tmp_path / "b" / "ledger.jsonl"))) == 8, "the other file is whole"
    assert run("c", 8)[0] == 8
    assert steps_of(tmp_path / "c") == [(7, "b"), (8, "b")], "what is left is stored from its start"


def test_the_summary_is_stored_once_and_restored(run: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    run("a", 6)
    checkpoints, here, there = str(tmp_path / "shared"), RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    write_summary(here.summary, {"steps": 6, "train_seconds": 1.5})
    for _ in range(2):
        with CheckpointStore(checkpoints, keep=2) as store:
            store_summary(checkpoints, store, here)
    assert len(list((tmp_path / "shared" / "files").glob("summary-*"))) == 1
    restore_files(checkpoints, there, SILENT)
    assert read_summary(there, 6) == {"steps": 6, "train_seconds": 1.5}
    assert read_summary(there, 8) is None
    run("b", 8)
    restore_files(checkpoints, RunFolder(tmp_path / "c"), SILENT)
    assert not (tmp_path / "c" / "summary.json").exists(), "the summary is of step 6, and the newest is step 8"


def test_a_tracker_recognises_the_run_from_another_machine(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tracked.json").write_text(json.dumps({"token": "abc", "steps": {"tensorboard": 4}}))
    run("a", 6)
    run("b", 8)
    tracked = json.loads((tmp_path / "b" / "tracked.json").read_text())
    assert tracked == {"token": "abc", "steps": {}}, "what a tracker in the lost folder had is lost too"


def test_a_finished_run_on_a_machine_that_has_only_the_checkpoints(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(f"checkpoint.folder={tmp_path / 'shared'}", "data.ledger=true")
    finished = loop.train(job, LineReporter(io.StringIO(), clock=time.monotonic))
    folder = Path(job.runs) / job.name
    names = ("job.yaml", "metrics.jsonl", "ledger.jsonl", "summary.json")
    before = {name: (folder / name).read_bytes() for name in names}
    shutil.rmtree(job.runs)
    again = loop.train(job, LineReporter(io.StringIO(), clock=time.monotonic))
    assert finished is not None
    assert again is not None
    assert again.summary == {**finished.summary, "resumed_at": 6}
    assert {name: (folder / name).read_bytes() for name in names} == before
