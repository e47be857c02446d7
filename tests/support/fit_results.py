"""Compile requests, and results of compilations that nobody compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.planner.memory import MemoryReport
from forerun.planner.time.step_time import StepTime
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB, Bytes, Seconds


def resolved(**job: Any) -> ResolvedJob:
    """Return a small job with these keys."""
    return ResolvedJob(Job.model_validate({"model": "qwen3-0.6b", "data": "nothing", "steps": 5, **job}))


def request(on: str = "v5e-8", **job: Any) -> CompileRequest:
    """Return a request for a slice, for the job that `resolved` returns."""
    return CompileRequest(resolved(**job), slice_named(on))


def fit_result(
    question: CompileRequest, seconds: float | None = 1.0, memory_gib: tuple[float, ...] = (8, 1, 2), **fields: Any
) -> FitResult:
    """Return a result. The job does not fit if `seconds` is None.

    `memory_gib` is the peak, the weights, the optimizer, the batch and the memory of the host; missing ones are 0.
    """
    memory = MemoryReport(*(Bytes(int(n * GIB)) for n in (*memory_gib, 0, 0, 0, 0)[:5]))
    step = None if seconds is None else StepTime(seconds, {"matmul": seconds})
    mesh = str(question.mesh_shape())
    result = FitResult(question, memory, step is not None, Seconds(1), "0123456789ab", mesh, 1e15, 1 << 20, step=step)
    return replace(result, **fields)
