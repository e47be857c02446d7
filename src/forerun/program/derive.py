"""What follows from a job and a mesh: the numbers a run really has, each with its reason.

Free of jax: `forerun check` prints these rows, `build` uses the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.units import Count


@dataclass(frozen=True)
class Derived:
    mesh: MeshShape
    batch: int
    micro_batch: int
    accumulation: int
    tokens_per_step: int
    steps: int
    warmup_steps: int
    steps_per_epoch: float | None
    reasons: dict[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, value, reason), for people."""
        dp = self.mesh.data_parallel
        epoch = "unknown" if self.steps_per_epoch is None else f"{self.steps_per_epoch:.1f}"
        return [
            ("mesh", f"{self.mesh}", f"data x fsdp x tp on {self.mesh.devices} devices"),
            ("micro_batch", f"{self.micro_batch}", self.reasons["micro_batch"]),
            ("accumulation", f"{self.accumulation}", f"batch {self.batch} / (micro_batch {self.micro_batch} x {dp})"),
            (
                "effective batch",
                f"{self.batch}",
                f"micro_batch {self.micro_batch} x accumulation {self.accumulation} x {dp} data-parallel devices",
            ),
            ("tokens per step", f"{Count(self.tokens_per_step)}", "effective batch x sequence"),
            ("steps per epoch", epoch, self.reasons["steps_per_epoch"]),
            ("steps", f"{self.steps}", self.reasons["steps"]),
            ("warm-up steps", f"{self.warmup_steps}", self.reasons["warmup"]),
        ]


def derive(job: Job, mesh: MeshShape, examples: int | None) -> Derived:
    """`examples` are the rows of an epoch; None if the data was not looked at."""
    reasons: dict[str, str] = {}
    micro = _micro_batch(job, mesh, reasons)
    per_epoch = None if examples is None else examples / job.batch
    reasons["steps_per_epoch"] = (
        "the data was not read" if examples is None else f"{examples} rows of {job.sequence} tokens / batch {job.batch}"
    )
    steps = _steps(job, per_epoch, reasons)
    return Derived(
        mesh=mesh,
        batch=job.batch,
        micro_batch=micro,
        accumulation=job.batch // (micro * mesh.data_parallel),
        tokens_per_step=job.batch * job.sequence,
        steps=steps,
        warmup_steps=_warmup(job, steps, reasons),
        steps_per_epoch=per_epoch,
        reasons=reasons,
    )


def _micro_batch(job: Job, mesh: MeshShape, reasons: dict[str, str]) -> int:
    dp = mesh.data_parallel
    if job.batch % dp:
        below, above = job.batch // dp * dp, (job.batch // dp + 1) * dp
        raise UserError(
            f"batch {job.batch} does not divide over {dp} data-parallel devices",
            why=f"mesh {mesh}: data {mesh.data} x fsdp {mesh.fsdp} devices each take the same number of sequences",
            fix=f"set batch={above}" + (f" or batch={below}" if below else "") + ", or another mesh",
        )
    share = job.batch // dp
    micro = job.micro_batch or share
    if share % micro:
        good = max(n for n in range(1, micro + 1) if share % n == 0)
        raise UserError(
            f"micro_batch {micro} does not divide the {share} sequences of a device",
            why=f"batch {job.batch} over {dp} data-parallel devices is {share} each",
            fix=f"set micro_batch={good}",
        )
    reasons["micro_batch"] = "the job's" if job.micro_batch else f"batch {job.batch} / {dp} devices at once"
    return micro


def _steps(job: Job, per_epoch: float | None, reasons: dict[str, str]) -> int:
    if job.steps is not None:
        reasons["steps"] = "the job's"
        return job.steps
    epochs = job.epochs or 1.0
    if per_epoch is None:
        raise UserError(
            "the number of steps is not known",
            why=f"it is {epochs:g} epochs of data that was not read",
            fix="set steps",
        )
    reasons["steps"] = f"{epochs:g} epochs x {per_epoch:.1f} steps, rounded up"
    return math.ceil(epochs * per_epoch)


def _warmup(job: Job, steps: int, reasons: dict[str, str]) -> int:
    warmup = job.optimizer.warmup
    if warmup >= 1:
        reasons["warmup"] = "the job's"
        return min(steps, round(warmup))
    reasons["warmup"] = f"{warmup:.0%} of {steps} steps"
    return round(warmup * steps)
