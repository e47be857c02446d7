"""Hours and dollars of writing a teacher down, from the compiler's word on its forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.config.schema import Job, Mesh
from forerun.errors import UserError
from forerun.hardware.slices import Slice
from forerun.plan.money import ASSUMPTIONS, Offer, Range, Tariff, offer, over_step
from forerun.plan.question import Impossible, Question
from forerun.plan.verdict import Verdict
from forerun.units import Seconds


@dataclass(frozen=True)
class RecordingBill:
    """`hours` include the start and the compile, as those of a run do, and reading the teacher's files."""

    batches: int
    begin_seconds: Seconds  # before the first batch
    hours: Range
    on_demand: Offer | None  # None: no price is known
    spot: Offer | None  # a preemption costs a shard at most, which is not counted


def recording_question(job: Job, slice_: Slice) -> Question:
    """The teacher's forward on that slice, with the rows of the job's micro-batch on every device."""
    devices = slice_.used_devices(job.devices)
    per_device = job.micro_batch or max(1, job.batch // devices)
    update = {"mesh": Mesh(), "micro_batch": per_device, "batch": per_device * devices}
    return Question(job.model_copy(update=update), slice_, recording=True)


def recording_bill(verdict: Verdict, rows: int, tariff: Tariff) -> RecordingBill | None:
    """None where the teacher does not fit."""
    if verdict.step is None:
        return None
    batches = math.ceil(rows / verdict.question.job.batch)
    weights_bytes = verdict.memory.weights_bytes * verdict.question.devices  # each has its part
    reading = weights_bytes / ASSUMPTIONS.bucket_bytes_per_second
    begin = Seconds(ASSUMPTIONS.start_seconds + ASSUMPTIONS.compile_seconds + reading)
    hours = over_step(verdict, lambda step: (begin + batches * step) / 3600)
    return RecordingBill(
        batches, begin, hours, offer(verdict, tariff, hours, spot=False), offer(verdict, tariff, hours, spot=True)
    )


def possible_slices(job: Job, slices: Sequence[Slice]) -> tuple[list[Slice], list[Impossible]]:
    """Split `slices` into those that can cache a teacher and the others; raise the error if no slice can."""
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
            f"forerun cache runs on one host, and {one.name} has {one.hosts}",
            why="a teacher's words are written by one process, with all devices of its host",
            fix="--on v6e-8; hosts that train read the folder, on any slice",
        )
