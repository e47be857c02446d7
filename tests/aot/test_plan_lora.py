"""LoRA and QLoRA through the TPU compiler: what must fit, fits, and only adapters have gradients."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from forerun.config.load import load
from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile import compiler
from forerun.planner.compile.compiler import verdict
from forerun.planner.compile.request import CompileRequest, requests_of
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB

pytestmark = pytest.mark.aot

JOBS = Path(__file__).resolve().parents[2] / "bench" / "jobs"
TINY = {
    "model": {"layers": 2, "embed": 256, "heads": 4, "head_dim": 128, "vocab": 512},
    "data": "nothing",
    "sequence": 256,
    "batch": 16,
    "micro_batch": 1,
    "steps": 10,
}


def test_qwen3_06b_with_adapters_in_four_gib() -> None:
    job = load(JOBS / "lora-qwen3-0.6b.yaml").job
    found = verdict(requests_of(ResolvedJob(job), [slice_named("v6e-1")])[0])
    assert found.fits
    assert found.memory.peak_bytes <= 4 * GIB
    assert found.memory.optimizer_bytes < 0.1 * GIB, "moments of the adapters alone"


@pytest.mark.parametrize(
    ("slice_name", "lora"), [("v5e-8", {"base": "nf4", "dropout": 0.1}), ("v6e-1", {"base": "int4", "dora": True})]
)
def test_quantized_bases_compile(slice_name: str, lora: dict[str, object]) -> None:
    job = Job.model_validate({**TINY, "lora": {"rank": 4, **lora}})
    answer = compiler.ask(
        CompileRequest(ResolvedJob(job), slice_named(slice_name)), threading.Event(), lambda phase: None
    )
    assert answer.fits
