"""Numbers that follow from a job and a mesh, such as the micro-batch and the steps, each with its reason.

`forerun check` prints them and `build` uses them. This module does not import jax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.config.schema import Job, Optimizer
from forerun.errors import UserError
from forerun.hardware.mesh import AXES, MeshShape, check_model, check_sequence
from forerun.units import Count, Seconds

GIVEN = "the job's"  # the reason for a value that the job file sets


@dataclass(frozen=True)
class Derived:
    """The numbers of a job on a mesh.

    Args:
      batch: sequences per optimizer step, over all devices.
      micro_batch: sequences per device in one forward and backward pass.
      accumulation: micro-batches per optimizer step.
      tokens_per_step: tokens per optimizer step, over all devices.
      warmup_steps: steps in which the learning rate rises.
      fall_steps: last steps, in which the learning rate falls.
      steps_per_epoch: may be a fraction, because batches continue across epochs. None if the data was not read.
      reasons: where each number comes from, for the user.
      fewer_slices: the row about runs that may continue with fewer slices; None for other jobs.
    """

    mesh: MeshShape
    batch: int
    micro_batch: int
    accumulation: int
    tokens_per_step: int
    steps: int
    warmup_steps: int
    fall_steps: int
    steps_per_epoch: float | None
    reasons: dict[str, str]
    fewer_slices: tuple[str, str, str] | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value, reason) of each number, for the user."""
        dp = self.mesh.data_parallel
        others = "".join(f" x {name}" for name in self.mesh.sizes if name not in AXES)
        epoch = "unknown" if self.steps_per_epoch is None else f"{self.steps_per_epoch:.1f}"
        rows = [
            ("mesh", f"{self.mesh}", f"data x fsdp x tp{others} on {_counted(self.mesh.devices, 'device')}"),
            *([self.fewer_slices] if self.fewer_slices else []),
            ("micro_batch", f"{self.micro_batch}", self.reasons["micro_batch"]),
            ("accumulation", f"{self.accumulation}", f"batch {self.batch} / (micro_batch {self.micro_batch} x {dp})"),
            (
                "effective batch",
                f"{self.batch}",
                f"micro_batch {self.micro_batch} x accumulation {self.accumulation} x "
                + _counted(dp, "data-parallel device"),
            ),
            ("tokens per step", f"{Count(self.tokens_per_step)}", "effective batch x sequence"),
            ("steps per epoch", epoch, self.reasons["steps_per_epoch"]),
            ("steps", f"{self.steps}", self.reasons["steps"]),
            ("warm-up steps", f"{self.warmup_steps}", self.reasons["warmup"]),
        ]
        return (
            [*rows, ("decay steps", f"{self.fall_steps}", self.reasons["decay"])] if "decay" in self.reasons else rows
        )


def derive(job: Job, mesh: MeshShape, examples: int | None) -> Derived:
    """Return the numbers of a job on a mesh.

    Args:
      examples: rows of an epoch, or None if the data was not read.

    Raises:
      UserError: the batch cannot be split over the mesh, or the steps depend on data that was not read.
    """
    check_model(mesh, None, job.batch, job.micro_batch)
    check_sequence(mesh, job.sequence)
    reasons: dict[str, str] = {}
    micro = _micro_batch(job, mesh, reasons)
    per_epoch = None if examples is None else examples / job.batch
    reasons["steps_per_epoch"] = (
        "the data was not read"
        if examples is None
        else f"{_counted(examples, 'row')} of {job.sequence} tokens / batch {job.batch}"
    )
    steps = _steps(job, per_epoch, reasons)
    warmup_steps = _warmup(job, steps, reasons)
    if job.optimizer.decay is not None:
        share = f"{job.optimizer.decay * 100:g} % of {_counted(steps, 'step')}"
        reasons["decay"] = GIVEN if job.optimizer.decay >= 1 else share
    return Derived(
        mesh=mesh,
        batch=job.batch,
        micro_batch=micro,
        accumulation=job.batch // (micro * mesh.data_parallel),
        tokens_per_step=job.batch * job.sequence,
        steps=steps,
        warmup_steps=warmup_steps,
        fall_steps=fall_steps(job.optimizer, steps, warmup_steps),
        steps_per_epoch=per_epoch,
        reasons=reasons,
        fewer_slices=fewer_slices_row(job, mesh, micro),
    )


def _micro_batch(job: Job, mesh: MeshShape, reasons: dict[str, str]) -> int:
    dp, common = mesh.data_parallel, common_micro_batch(job, mesh)
    if common is not None:
        reasons["micro_batch"] = GIVEN if job.micro_batch else "the largest that divides the batch on fewer slices, too"
        return common
    reasons["micro_batch"] = (
        GIVEN if job.micro_batch else f"batch {job.batch} / {_counted(dp, 'device')}, no accumulation"
    )
    return job.micro_batch or job.batch // dp


def _steps(job: Job, per_epoch: float | None, reasons: dict[str, str]) -> int:
    if job.steps is not None:
        reasons["steps"] = GIVEN
        return job.steps
    epochs = job.epochs or 1.0
    if per_epoch is None:
        raise UserError(
            "E-PROGRAM-002",
            "the number of steps is not known",
            why=f"it is {_counted(epochs, 'epoch')} of data that was not read",
            fix="set steps",
        )
    reasons["steps"] = f"{_counted(epochs, 'epoch')} x {per_epoch:.1f} steps, rounded up"
    return math.ceil(epochs * per_epoch)


def _counted(number: float, thing: str) -> str:
    text = f"{number:g}" if isinstance(number, float) else f"{number}"
    return f"{text} {thing}" + ("" if number == 1 else "s")


def _warmup(job: Job, steps: int, reasons: dict[str, str]) -> int:
    warmup = job.optimizer.warmup
    if warmup >= 1:
        reasons["warmup"] = GIVEN
        return min(steps, round(warmup))
    reasons["warmup"] = f"{warmup * 100:g} % of {_counted(steps, 'step')}"
    return round(warmup * steps)


def fall_steps(optimizer: Optimizer, steps: int, warmup_steps: int) -> int:
    """Return the number of last steps in which the learning rate falls: all after the warm-up, unless it is wsd."""
    rest = steps - warmup_steps
    if optimizer.decay is None:
        return rest
    return min(rest, round(optimizer.decay if optimizer.decay >= 1 else optimizer.decay * steps))


# ---- The batch of a run that may continue with fewer slices ----
#
# The batch of a step is the same on fewer slices, so each device has more of its rows. It computes them in more
# micro-batches of the same size, so a micro-batch needs the same memory. The batch must divide over each number
# of slices.


def slice_counts(job: Job, mesh: MeshShape) -> range:
    """Return the numbers of slices that the run may have, in ascending order. It is empty if the number never changes.

    Args:
      job: its `mesh.min_slices` permits fewer slices.
      mesh: the mesh of one of these numbers. The mesh within a slice is always the same.
    """
    if job.mesh.min_slices is None or job.mesh.slices is None:
        return range(0)
    counts = range(job.mesh.min_slices, job.mesh.slices + 1)
    return counts if len(counts) > 1 and mesh.slices in counts else range(0)


def common_micro_batch(job: Job, mesh: MeshShape) -> int | None:
    """Return the micro-batch for every number of slices, or None if the number never changes.

    Raises:
      UserError: the batch or the job's micro-batch does not divide for one of the numbers.
    """
    counts = slice_counts(job, mesh)
    if not counts:
        return None
    parts = mesh.data_parallel // mesh.slices
    for count in counts:
        if job.batch % (count * parts):
            step = math.lcm(*counts) * parts
            near = sorted({max(job.batch // step, 1) * step, (job.batch // step + 1) * step})
            raise UserError(
                "E-PROGRAM-020",
                f"batch={job.batch} does not divide over {count} of {job.mesh.slices} slices",
                why=f"mesh.min_slices={job.mesh.min_slices}: the run may continue with {count} slices, which have "
                f"{count * parts} data-parallel devices",
                fix=" or ".join(f"batch={value}" for value in near) + ", or another mesh.min_slices",
            )
    shares = {count: job.batch // (count * parts) for count in counts}
    common = math.gcd(*shares.values())
    if job.micro_batch is None:
        return common
    for count, share in shares.items():
        if share % job.micro_batch:
            raise UserError(
                "E-PROGRAM-021",
                f"micro_batch={job.micro_batch} does not divide the {share} sequences of a device on {count} of "
                f"{job.mesh.slices} slices",
                why=f"mesh.min_slices={job.mesh.min_slices}: the batch stays the same on {count} slices",
                fix=f"micro_batch={common}, or remove micro_batch",
            )
    return job.micro_batch


def fewer_slices_row(job: Job, mesh: MeshShape, micro_batch: int) -> tuple[str, str, str] | None:
    """Return (name, value, reason) for the user about runs with fewer slices, or None if the number never changes."""
    counts = slice_counts(job, mesh)
    if not counts:
        return None
    parts = mesh.data_parallel // mesh.slices
    steps = ", ".join(f"{job.batch // (count * parts * micro_batch)} on {count}" for count in counts)
    waits = f"a lost slice is waited for {Seconds(job.mesh.slice_wait_seconds)}"
    return "slices", f"{counts[0]} to {counts[-1]}", f"mesh.min_slices; {waits}; accumulation: {steps}"
