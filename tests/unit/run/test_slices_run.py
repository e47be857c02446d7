"""A run on two virtual slices: the losses of one slice, and its checkpoints resume on one slice."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from forerun.config.schema import Job
from forerun.reporter import LineReporter
from forerun.run import train as loop
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]
MORE = ("batch=8", "sample.tokens=2", "optimizer.schedule=constant", "optimizer.warmup=0")


def trained(job: Job) -> loop.TrainResult:
    finished = loop.train(job, LineReporter(io.StringIO(), clock=time.monotonic))
    assert finished is not None
    return finished


def figures(job: Job, name: str) -> np.ndarray:
    rows = read_metrics(Path(job.runs) / job.name / "metrics.jsonl")
    return np.array([row[name] for row in rows if name in row])


def test_a_run_on_two_slices_is_that_on_one(make_job: MakeJob) -> None:
    """With samples and a comparison of replicas; then the run on two slices resumes on one."""
    one = make_job("name=one", "devices=4", "steps=8", *MORE)
    first = trained(one)
    two = make_job("name=two", "devices=8", "mesh.slices=2", "guard.compare_every=2", *MORE)
    assert trained(two).summary["mesh"] == "2x(1x4x1)"
    np.testing.assert_allclose(figures(two, "loss"), figures(one, "loss")[:6], rtol=1e-5)
    resumed = trained(make_job("name=two", "devices=4", "steps=8", "guard.compare_every=2", *MORE))
    assert resumed.summary["resumed_at"] == 6
    for mine, theirs in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(first.state), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=1e-4, atol=1e-5)
