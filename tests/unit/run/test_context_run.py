"""A LoRA run whose sequences are split over devices: the losses of one device, also after a restart."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.config.schema import Job
from forerun.reporter import LineReporter
from forerun.run import train as loop
from forerun.run.guard import DivergenceError
from forerun.track.metrics import read_metrics

MakeJob = Callable[..., Job]


def losses(job: Job) -> list[float]:
    return [row["loss"] for row in read_metrics(Path(job.runs) / job.name / "metrics.jsonl")]


class BadFromStep5:
    """Batches whose weights are no numbers from step 5 on."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def batch_at(self, index: int) -> Any:
        batch = self._batches.batch_at(index)
        return replace(batch, weights=np.full_like(batch.weights, np.nan)) if index >= 4 else batch


def test_a_split_run_that_restarts_is_the_run_of_one_device(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("lora.rank=2", "sequence=32", "steps=8")
    split = make_job(*settings, "devices=4", "mesh.fsdp=2", "mesh.context=2")
    healthy, display = loop.batches_of, LineReporter(io.StringIO(), clock=time.monotonic)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "batches_of", lambda *given: BadFromStep5(healthy(*given)))
        with pytest.raises(DivergenceError):
            loop.train(split, display)
    loop.train(split, display)  # continues from the checkpoint of step 4
    alone = make_job(*settings, "name=alone")
    loop.train(alone, display)
    assert len(losses(split)) == 8
    assert losses(split) == pytest.approx(losses(alone), rel=1e-5)
