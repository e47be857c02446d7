from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_job import TEXT

from forerun.checkpoint.store import CheckpointStore
from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.feed import Feed
from forerun.data.order.batches import Batches
from forerun.errors import UserError
from forerun.hardware.devices import choose
from forerun.objectives.batch import Batch
from forerun.program.build import Program
from forerun.report.differences import program_of_run
from forerun.reporter import LineReporter, StepView
from forerun.resolve.resolve_model import resolve_model
from forerun.run import prepared_run
from forerun.run import train as loop
from forerun.run.compile_step import RecompileError
from forerun.run.guard import DivergenceError
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]


def display(lines: io.StringIO | None = None) -> LineReporter:
    return LineReporter(lines or io.StringIO(), clock=time.monotonic)


def losses(job: Job) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(Path(job.runs) / job.name / "metrics.jsonl")}


def poisoned_from(step: int) -> Callable[[Job, Program, Corpus], Any]:
    """Batches whose weights are no numbers from this step on, and so their loss."""
    healthy = loop.batches_of

    class Poisoned:
        def __init__(self, batches: Batches) -> None:
            self._batches = batches

        def batch_at(self, index: int) -> Batch[Any]:
            batch = self._batches.batch_at(index)
            return replace(batch, weights=np.full_like(batch.weights, np.nan)) if index + 1 >= step else batch

    return lambda job, program, corpus: Poisoned(healthy(job, program, corpus))


def test_a_run_tells_its_phases_and_leaves_its_folder(make_job: MakeJob) -> None:
    lines = io.StringIO()
    job = make_job("sample.tokens=5", "log_every=4")
    finished = loop.train(job, display(lines))
    told = lines.getvalue()
    places = [told.index(word) for word in ("device: ", "data ", "program: ", "trace ", "lower ", "compile ", "state ")]
    assert places == sorted(places)
    assert told.index("model: random weights (seed 0): trains from scratch") < told.index("compile")
    folder = Path(job.runs) / "tiny"
    assert json.loads((folder / "summary.json").read_text()) == finished.summary
    compiled = program_of_run(folder)
    assert compiled is not None
    assert (compiled.program, compiled.mesh) == (finished.summary["program"], finished.summary["mesh"])
    assert compiled.job["sample.tokens"] == "5"
    assert list(losses(job)) == [4, 6], "every fourth step and the last"
    last = read_metrics(folder / "metrics.jsonl")[-1]  # a row over two steps: 2 x 8 rows of 16 tokens
    assert last["tokens_per_second"] == pytest.approx(16 * last["samples_per_second"])
    assert 2 * 8 / last["samples_per_second"] > last["step_seconds"], "the interval contains the step"
    rows_of_text = math.ceil((len(TEXT) + 1) / 16)
    assert last["epoch"] == pytest.approx(6 * 8 / rows_of_text, rel=0.02)
    assert last["epoch_seconds"] == pytest.approx((6 / last["epoch"]) * 8 / last["samples_per_second"])
    assert finished.summary["epochs"] == last["epoch"]
    assert not {"mfu", "hbm_bytes", "hbm_peak_bytes"} & set(last), "a CPU reports neither a peak nor its memory"
    with closing(CheckpointStore(folder / "checkpoints", keep=2)) as store:
        assert store.steps() == [4, 6]
    assert finished.sample.startswith("The ")
    assert (finished.summary["steps"], finished.summary["resumed_at"]) == (6, 0)
    assert finished.summary["tokens"] == 6 * 8 * 16
    assert finished.summary["tokens_per_second"] == pytest.approx(8 * 16 / finished.summary["step_seconds"])


def test_every_row_has_the_rates_of_its_own_step(make_job: MakeJob) -> None:
    job = make_job("steps=3", "checkpoint.every=9")
    loop.train(job, display())
    rows = read_metrics(Path(job.runs) / "tiny" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_seconds"])
        assert row["samples_per_second"] == pytest.approx(8 / row["step_seconds"])


def test_the_job_sets_how_far_the_feed_runs_ahead(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []

    class Depth(Feed[Any, Any]):
        def __init__(self, *args: Any, ahead: int, **more: Any) -> None:
            depths.append(ahead)
            super().__init__(*args, ahead=ahead, **more)

    monkeypatch.setattr(prepared_run, "Feed", Depth)
    loop.train(make_job("steps=1", "data.prefetch=7"), display())
    assert depths == [7]


def test_a_finished_run_is_not_run_again(make_job: MakeJob) -> None:
    job = make_job()
    loop.train(job, display())
    before = losses(job)
    summary = (Path(job.runs) / "tiny" / "summary.json").read_text()
    again = loop.train(job, display())
    assert losses(job) == before
    assert (Path(job.runs) / "tiny" / "summary.json").read_text() == summary, "its times are those of the run"
    assert again.summary == {**json.loads(summary), "resumed_at": 6}
    assert again.summary["final_loss"] == before[6]


def test_a_batch_without_loss_is_not_the_best_step(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 3 and 6 learn nothing: a loss of 0 would rank their checkpoints first and be the result of the run."""
    healthy = loop.batches_of

    class Masked:
        def __init__(self, batches: Batches) -> None:
            self._batches = batches

        def batch_at(self, index: int) -> Batch[Any]:
            batch = self._batches.batch_at(index)
            return replace(batch, weights=np.zeros_like(batch.weights)) if index + 1 in (3, 6) else batch

    monkeypatch.setattr(loop, "batches_of", lambda job, program, corpus: Masked(healthy(job, program, corpus)))
    job = make_job("log_every=1")
    lines = io.StringIO()
    finished = loop.train(job, display(lines))
    rows = {row["step"]: row for row in read_metrics(Path(job.runs) / job.name / "metrics.jsonl")}
    assert {step for step, row in rows.items() if "loss" not in row} == {3, 6}
    assert [rows[step]["tokens"] for step in (3, 6)] == [0, 0]
    assert finished.summary["final_loss"] == rows[5]["loss"] > 1
    assert "no token with a loss" in lines.getvalue()
    with closing(CheckpointStore(Path(job.runs) / "tiny" / "checkpoints", keep=2)) as store:
        assert store.record(6)["loss"] is None


@pytest.mark.parametrize("bad_step", [5, 6])
def test_a_loss_that_is_no_number_is_never_saved(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, bad_step: int
) -> None:
    """Between two saves; in the second case the steps that are left out go beyond the next save, which is put off."""
    job = make_job("steps=12")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "batches_of", poisoned_from(bad_step))
        with pytest.raises(DivergenceError, match=rf"{bad_step}.*nan.*{bad_step + 3}.*E-RUN-030"):
            loop.train(job, display())
    program = loop.program_on(resolve_model(job), choose("cpu", 1), None)
    with closing(CheckpointStore(Path(job.runs) / "tiny" / "checkpoints", keep=2)) as store:
        assert store.newest() == 4
        saved = store.restore(4, program.state)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(saved))

    loop.train(job, display())  # the data is whole again: the same command goes on from step 4
    undisturbed = make_job("steps=12", "name=undisturbed")
    loop.train(undisturbed, display())
    assert losses(job) == losses(undisturbed)
    assert all(math.isfinite(loss) for loss in losses(job).values())


def test_the_only_step_that_was_left_to_do_is_bad(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed before its last step, which is left out: the run ends with the figures of the step before."""
    job = make_job("checkpoint.every=5", "data.ledger=true")
    healthy = loop.batches_of

    def raised(batch: Batch[Any]) -> Batch[Any]:
        raise RuntimeError("no more")

    def spoiled(batch: Batch[Any]) -> Batch[Any]:
        return replace(batch, weights=np.full_like(batch.weights, np.nan))

    class Last:
        def __init__(self, batches: Batches, what: Callable[[Batch[Any]], Batch[Any]]) -> None:
            self.examples_at, self._batches, self._what = batches.examples_at, batches, what

        def batch_at(self, index: int) -> Batch[Any]:
            batch = self._batches.batch_at(index)
            return self._what(batch) if index == 5 else batch

    def with_last(what: Callable[[Batch[Any]], Batch[Any]]) -> None:
        monkeypatch.setattr(loop, "batches_of", lambda *given: Last(healthy(*given), what))

    with_last(raised)
    with pytest.raises(RuntimeError, match="no more"):
        loop.train(job, display())
    with_last(spoiled)
    lines = io.StringIO()
    finished = loop.train(job, display(lines))
    assert "6: loss nan" in lines.getvalue()
    folder = Path(job.runs) / "tiny"
    *rows, last = read_metrics(folder / "metrics.jsonl")
    assert last == {"step": 6, "skipped": "loss nan, gradient norm nan", "unix_seconds": last["unix_seconds"]}
    assert finished.summary["resumed_at"] == 5
    assert finished.summary["final_loss"] == rows[-1]["loss"]
    assert int(finished.state.step) == 5, "the schedule counts what was taken"
    with closing(CheckpointStore(folder / "checkpoints", keep=2)) as store:
        assert store.steps() == [5, 6]
    assert json.loads((folder / "ledger.jsonl").read_text().splitlines()[-1])["examples"] == []
    assert loop.train(job, display()).summary["resumed_at"] == 6


def test_a_learning_rate_beyond_all_reason_stops_with_advice(make_job: MakeJob) -> None:
    job = make_job("optimizer.lr=1e30", "optimizer.warmup=0")
    with pytest.raises(UserError) as stopped:
        loop.train(job, display())
    assert "optimizer.lr" in stopped.value.fix
    assert "--fresh" in stopped.value.fix, "the folder refuses a job with another learning rate"
    mended = make_job("optimizer.lr=1e-3", "optimizer.warmup=0")
    assert loop.train(mended, display(), fresh=True).summary["resumed_at"] == 0


def test_a_compilation_between_steps_stops_the_run(make_job: MakeJob) -> None:
    class Careless(LineReporter):
        def step(self, view: StepView) -> None:
            if view.step == 3:
                jnp.sin(jnp.ones(view.step + 40))

    job = make_job("name=careless")
    with pytest.raises(RecompileError, match="compiled during step 4"):
        loop.train(job, Careless(io.StringIO(), clock=time.monotonic))
    assert max(losses(job)) == 3


def test_saving_weights_that_every_device_holds_compiles_nothing(make_job: MakeJob) -> None:
    """Orbax would cut replicated arrays into slices on the devices, a program for each, in the middle of the run."""
    job = make_job("devices=2", "mesh.data=2", "mesh.fsdp=1")
    assert loop.train(job, display()).summary["mesh"] == "2x1x1"
    with closing(CheckpointStore(Path(job.runs) / "tiny" / "checkpoints", keep=2)) as store:
        assert store.steps() == [4, 6]
