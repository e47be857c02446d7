"""Hours and dollars of caching a teacher's logits, from compiling its forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.config.schema import Job, Mesh
from forerun.errors import UserError
from forerun.hardware.slices import Slice
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest, Impossible
from forerun.planner.cost.job_cost import ASSUMPTIONS, Offer, Range, Tariff, offer, over_step
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import Seconds


@dataclass(frozen=True)
class TeacherCost:
    """Time and cost of caching a teacher's logits."""

    batches: int
    begin_seconds: Seconds  # before the first batch: start, compile, and reading the teacher's weights
    hours: Range  # including begin_seconds
    on_demand: Offer | None  # None: no price is known
    spot: Offer | None  # does not count preemptions, which lose at most one shard each


def teacher_request(resolved: ResolvedJob, slice_: Slice) -> CompileRequest:
    """Return the request to compile the teacher's forward pass, with the job's micro-batch on every device."""
    job = resolved.job
    devices = slice_.used_devices(job.devices)
    per_device = job.micro_batch or max(1, job.batch // devices)
    changed = resolved.with_values(mesh=Mesh(), micro_batch=per_device, batch=per_device * devices)
    return CompileRequest(changed, slice_, recording=True)


def teacher_cost(verdict: FitResult, rows: int, tariff: Tariff) -> TeacherCost | None:
    """Return the time and cost of caching `rows` rows, or None if the teacher does not fit."""
    if verdict.step is None:
        return None
    batches = math.ceil(rows / verdict.question.job.batch)
    weights_bytes = verdict.memory.weights_bytes * verdict.question.devices  # the weights are split over the devices
    reading = weights_bytes / ASSUMPTIONS.bucket_bytes_per_second
    begin = Seconds(ASSUMPTIONS.start_seconds + ASSUMPTIONS.compile_seconds + reading)
    hours = over_step(verdict, lambda step: (begin + batches * step) / 3600)
    return TeacherCost(
        batches, begin, hours, offer(verdict, tariff, hours, spot=False), offer(verdict, tariff, hours, spot=True)
    )


def possible_slices(job: Job, slices: Sequence[Slice]) -> tuple[list[Slice], list[Impossible]]:
    """Split `slices` into those that can cache a teacher and the others; raise the first error if none can."""
    possible, impossible = [], []
    for one in slices:
        try:
            one.used_devices(job.devices)
            _require_one_host(one)
        except UserError as error:
            impossible.append(Impossible(one, error))
        else:
            possible.append(one)
    if not possible:
        raise impossible[0].error
    return possible, impossible


def _require_one_host(one: Slice) -> None:
    if one.hosts > 1:
        raise UserError(
            "E-PLAN-014",
            f"forerun cache runs on one host, and {one.name} has {one.hosts}",
            why="one process writes the teacher's logits, with all devices of its host",
            fix="--on v6e-8; training can read the folder on any slice",
        )
