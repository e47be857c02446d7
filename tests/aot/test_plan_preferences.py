"""Preferences by the real TPU compiler: pairs, and a reference from the batch, from the base or beside."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = pytest.mark.aot

BASE: dict[str, Any] = {
    "model": {"layers": 2, "embed": 256, "heads": 4, "head_dim": 128, "vocab": 512},
    "data": "nothing",
    "sequence": 256,
    "batch": 16,
    "micro_batch": 1,
    "steps": 10,
}
JOBS = {
    "cached": {"preferences": "dpo"},
    "base": {"preferences": {"loss": "ipo"}, "lora": {"rank": 4}},
    "beside": {"preferences": {"loss": "cdpo", "reference": "beside"}},
}


@pytest.mark.parametrize(("reference", "slice_name"), [("cached", "v6e-1"), ("beside", "v6e-1"), ("base", "v5e-8")])
def test_it_compiles(reference: str, slice_name: str) -> None:
    job = Job.model_validate(BASE | JOBS[reference])
    answer = compiler.ask(
        CompileRequest(ResolvedJob(job), slice_named(slice_name)), threading.Event(), lambda phase: None
    )
    assert answer.fits
