"""A LoRA run whose experts are split over devices resumes on another mesh, with the losses of one device."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.config.schema import Job
from forerun.models import sizes
from forerun.models.decoder_config import ExpertConfig
from forerun.reporter import LineReporter
from forerun.run import train as loop
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]
CONSTANT = ("optimizer.schedule=constant", "optimizer.warmup=0")
NAME = "qwen3-30b-a3b"


def test_a_run_continues_on_another_mesh(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(sizes.SIZES[NAME], layers=1, embed=32, heads=4, kv_heads=2, head_dim=8)
    tiny = replace(tiny, experts=ExpertConfig(count=4, top=2, mlp=24))
    monkeypatch.setitem(sizes.SIZES, NAME, tiny)
    settings = (f"model={NAME}", "lora.rank=2", "sequence=32", "batch=8", *CONSTANT)
    display = LineReporter(io.StringIO(), clock=time.monotonic)
    loop.train(make_job(*settings, "steps=4", "devices=4", "mesh.fsdp=2", "mesh.expert=2"), display)
    job = make_job(*settings, "steps=8", "devices=4", "mesh.fsdp=1", "mesh.expert=4")
    resumed = loop.train(job, display)
    assert resumed is not None
    assert resumed.summary["resumed_at"] == 4
    loop.train(make_job(*settings, "steps=8", "name=alone"), display)
    losses = {
        name: [row["loss"] for row in read_metrics(Path(job.runs) / name / "metrics.jsonl") if "loss" in row]
        for name in (job.name, "alone")
    }
    assert len(losses["alone"]) == 8
    assert losses[job.name] == pytest.approx(losses["alone"], rel=1e-5)
