"""Rounded weights in the hands of the TPU compiler: jobs with them compile for one chip and for eight."""

from __future__ import annotations

import threading

import pytest

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.request import CompileRequest
from forerun.resolve.resolved_job import ResolvedJob

pytestmark = pytest.mark.aot

FIELDS = {
    "model": {"layers": 2, "embed": 256, "heads": 4, "head_dim": 128, "vocab": 512},
    "data": "nothing",
    "sequence": 256,
    "batch": 16,
    "micro_batch": 1,
    "steps": 10,
}


@pytest.mark.parametrize(
    ("slice_name", "method"),
    [
        ("v6e-1", {"qat": {"group": 32, "scales": "learned"}}),
        ("v5e-8", {"qat": {"weights": "int8", "group": None, "activations": "int8"}}),
        ("v5e-8", {"qat": {"group": 32}, "lora": {"rank": 32}}),
    ],
    ids=["int4 learned", "int8 activations", "int4 under an adapter"],
)
def test_a_job_with_rounded_weights_compiles(slice_name: str, method: dict[str, object]) -> None:
    job = Job.model_validate({**FIELDS, **method})
    answer = compiler.ask(
        CompileRequest(ResolvedJob(job), slice_named(slice_name)), threading.Event(), lambda phase: None
    )
    assert answer.fits
