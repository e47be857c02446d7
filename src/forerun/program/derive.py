"""What follows from a job and a mesh: the numbers a run really has, each with its reason.

Free of jax: `forerun check` prints these rows, `build` uses the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape, check_model
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
            ("mesh", f"{self.mesh}", f"data x fsdp x tp on {_counted(self.mesh.devices, 'device')}"),
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


def derive(job: Job, mesh: MeshShape, examples: int | None) -> Derived:
    """`examples` are the rows of an epoch; None if the data was not looked at."""
    check_model(mesh, None, job.batch, job.micro_batch)
    reasons: dict[str, str] = {}
    micro = _micro_batch(job, mesh, reasons)
    per_epoch = None if examples is None else steps_per_epoch(examples, job.batch)
    reasons["steps_per_epoch"] = (
        "the data was not read"
        if examples is None
        else f"{_counted(examples, 'row')} of {job.sequence} tokens / batch {job.batch}"
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


def steps_per_epoch(rows: int, batch: int) -> float:
    """Return how many steps see every row of an epoch once: batches continue across epochs, so it may be a fraction."""
    return rows / batch


def epochs_of(steps: int, rows: int, batch: int) -> float:
    """Return how many epochs `steps` are."""
    return steps * batch / rows


def _micro_batch(job: Job, mesh: MeshShape, reasons: dict[str, str]) -> int:
    dp = mesh.data_parallel
    reasons["micro_batch"] = (
        "the job's" if job.micro_batch else f"batch {job.batch} / {_counted(dp, 'device')}, all at once"
    )
    return job.micro_batch or job.batch // dp


def _steps(job: Job, per_epoch: float | None, reasons: dict[str, str]) -> int:
    if job.steps is not None:
        reasons["steps"] = "the job's"
        return job.steps
    epochs = job.epochs or 1.0
    if per_epoch is None:
        raise UserError(
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
        reasons["warmup"] = "the job's"
        return min(steps, round(warmup))
    reasons["warmup"] = f"{warmup * 100:g} % of {_counted(steps, 'step')}"
    return round(warmup * steps)
