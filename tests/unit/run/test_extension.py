"""A run with another number of steps, or another learning rate: one program, the same steps, nothing silent."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_assertions import raises_error

from forerun.checkpoint.reader import Reader
from forerun.config.schema import Job
from forerun.reporter import LineReporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run import train as loop
from forerun.run.compile_step import CACHE_HIT, COMPILED, count_events
from forerun.run.extension import Extension, extension_of, learning_rate
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]
CONSTANT = ("optimizer.schedule=constant", "optimizer.warmup=0")


def trained(job: Job) -> tuple[loop.TrainResult, str]:
    lines = io.StringIO()
    finished = loop.train(job, LineReporter(lines, clock=time.monotonic))
    assert finished is not None
    return finished, lines.getvalue()


def bits(finished: loop.TrainResult) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(finished.state)]


def rows(job: Job) -> list[dict[str, Any]]:
    return read_metrics(Path(job.runs) / job.name / "metrics.jsonl")


def figures(job: Job) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in rows(job) if "loss" in row]


@pytest.fixture(scope="module")
def ten(job_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, loop.TrainResult]:
    """Ten steps without a stop."""
    from forerun.config.load import load

    job = load(job_file, [f"runs={tmp_path_factory.mktemp('ten')}", "steps=10", *CONSTANT]).job
    return job, trained(job)[0]


def test_an_extended_run_is_the_longer_run(make_job: MakeJob, ten: tuple[Job, loop.TrainResult]) -> None:
    """Bit by bit, with a constant learning rate; and without a second compilation of the step."""
    six = make_job(*CONSTANT)
    first, _ = trained(six)
    again, told = trained(make_job("steps=10", *CONSTANT))
    assert bits(again) == bits(ten[1])
    assert figures(six) == figures(ten[0])
    assert again.summary["resumed_at"] == 6
    assert again.summary["program"] == first.summary["program"] == ten[1].summary["program"]
    assert "rate stays 0.01" in told
    change = {"step": 6, "steps_before": 6, "steps": 10, "lr_before": 0.01, "lr": 0.01, "lr_final": 0.01}
    [recorded] = again.summary["extensions"]
    assert recorded == pytest.approx(change)
    [line] = [row for row in rows(six) if "steps_before" in row]
    assert (line["step"], line["steps_before"], line["steps"]) == (7, 6, 10)
    assert Reader(Path(six.runs) / "tiny" / "checkpoints").record(10)["extensions"] == [recorded]

    with raises_error("E-RUN-024", "10"):
        loop.train(six, LineReporter(io.StringIO(), clock=time.monotonic))
    with raises_error("E-RUN-027"):
        loop.train(
            make_job("steps=12", "optimizer.lr=0.5", *CONSTANT), LineReporter(io.StringIO(), clock=time.monotonic)
        )


def test_another_learning_rate_compiles_no_step(make_job: MakeJob, ten: tuple[Job, loop.TrainResult]) -> None:
    """The sealed cache has the step of a run with other values."""
    other = make_job("name=other", "optimizer.lr=1e-3", "optimizer.weight_decay=0", "steps=2", *CONSTANT[:1])
    finished, _ = trained(other)
    assert finished.summary["compile_cached"]
    assert finished.summary["program"] == ten[1].summary["program"]
    assert [lr for _, _, lr, _ in figures(other)] == pytest.approx([1e-3] * 2)


def test_a_finished_run_compiles_and_reads_nothing(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another mesh, and without its data. A damaged last checkpoint is not a finished run."""
    job = make_job()
    trained(job)
    folder = Path(job.runs) / "tiny"
    summary = json.loads((folder / "summary.json").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(loop, "open_corpus_with_progress", lambda *given: pytest.fail("the data was read"))
        with count_events(COMPILED, CACHE_HIT) as counts:
            again, told = trained(make_job("devices=2", "mesh.fsdp=2"))
        assert counts == {COMPILED: 0, CACHE_HIT: 0}
        assert again.summary == {**summary, "resumed_at": 6}
        assert f"{summary['final_loss']:.4f}" in told
        assert str(folder) in told
        for override in ("steps=8", "seed=1"):
            with pytest.raises(pytest.fail.Exception):
                trained(make_job(override))
    (folder / "summary.json").unlink()
    assert trained(job)[0].summary["steps"] == 6, "a summary that is missing is written again"
    [newest] = [path for path in (folder / "checkpoints").glob("6-*") if path.is_dir()]
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    again, _ = trained(job)
    assert again.summary["resumed_at"] == 4
    assert again.summary["final_loss"] == summary["final_loss"]


def recorded(job: Job) -> dict[str, Any]:
    return {"job": job.model_dump(mode="json")}


def test_the_effect_on_the_schedule(make_job: MakeJob) -> None:
    """By the formula: cosine from lr to lr / 10 over the steps after the warm-up, which are 3 % of all."""
    job = make_job("optimizer.lr=3e-4", "steps=3000")
    longer = make_job("optimizer.lr=3e-4", "steps=4000")
    found = extension_of(ResolvedJob(longer), recorded(job), 3000, 3000)
    assert found is not None
    warmed = (3000 - 120) / (4000 - 120)
    assert found.lr_before == pytest.approx(3e-5, rel=1e-5)
    assert found.lr == pytest.approx(3e-4 * (0.1 + 0.9 * (1 + np.cos(np.pi * warmed)) / 2), rel=1e-5)
    assert found.lr_final == pytest.approx(3e-5, rel=1e-3)
    assert f"{found.lr:.3g}" in found.said("cosine")
    assert "instead of 3e-05" in found.said("cosine")
    assert learning_rate(ResolvedJob(longer), 4000) == pytest.approx(3e-5, rel=1e-6)
    assert extension_of(ResolvedJob(job), recorded(job), 1000, 1000) is None
    shorter = extension_of(ResolvedJob(make_job("steps=5", *CONSTANT)), recorded(make_job(*CONSTANT)), 5, 5)
    assert shorter is not None
    assert "no step remains" in shorter.said("constant")


def test_a_warm_up_that_has_not_ended_is_reported(make_job: MakeJob) -> None:
    found = extension_of(ResolvedJob(make_job("steps=1000")), recorded(make_job("steps=10")), 10, 10)
    assert isinstance(found, Extension)
    assert found.lr == pytest.approx(1e-2 * 11 / 30, rel=1e-5)


def test_an_extension_of_wsd_names_the_stable_phase_and_a_rise() -> None:
    before = Extension(step=40, steps_before=100, steps=200, lr_before=0.1, lr=0.1, lr_final=0.01)
    assert "stable phase" in before.said("wsd")
    assert "decay that had begun" not in before.said("wsd")
    within = Extension(step=95, steps_before=100, steps=200, lr_before=0.02, lr=0.1, lr_final=0.01)
    assert all(text in within.said("wsd") for text in ("stable phase", "0.1;", "0.02"))


def test_a_run_with_a_loop_resumes_without_it(make_job: MakeJob, ten: tuple[Job, loop.TrainResult]) -> None:
    """Checkpoints do not depend on `unroll`. On CPUs `auto` is a loop, and the run prints why."""
    first, told = trained(make_job("unroll=auto", *CONSTANT))
    assert "unroll (auto): false, because " in told
    again, _ = trained(make_job("steps=10", "unroll=true", *CONSTANT))
    assert again.summary["resumed_at"] == 6
    assert again.summary["program"] != first.summary["program"] == ten[1].summary["program"]
    for mine, theirs in zip(jax.tree.leaves(again.state), jax.tree.leaves(ten[1].state), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=1e-4, atol=1e-5)
