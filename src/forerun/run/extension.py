"""Extensions: a run that resumes with another number of steps, the effect on its schedule, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.program.schedule import Schedule, rate_at
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

EXTENSIONS = "extensions"  # key of a checkpoint's record and of summary.json


@dataclass(frozen=True)
class Extension:
    """A change of `steps` between a checkpoint and the run that resumes from it."""

    step: int  # step of the checkpoint
    steps_before: int
    steps: int
    lr_before: float  # learning rate of the next step, with the old number of steps
    lr: float  # learning rate of the next step, with the new number of steps
    lr_final: float  # learning rate of the last step

    @property
    def figures(self) -> dict[str, float]:
        """The row in metrics.jsonl."""
        return {"steps_before": self.steps_before, "steps": self.steps, "lr_before": self.lr_before, "lr": self.lr}

    def said(self, schedule: str) -> str:
        """Return a message about the change and its effect on the learning rate."""
        change = f"steps is {self.steps} now and was {self.steps_before} when step {self.step} was saved"
        if self.step >= self.steps:
            return f"{change}: no step remains"
        if self.lr == self.lr_before == self.lr_final:
            return f"{change}: the learning rate stays {self.lr:.3g}"
        if schedule == "wsd":
            rises = "" if self.lr == self.lr_before else f"; it was {self.lr_before:.3g} in the decay that had begun"
            return (
                f"{change}: the stable phase is extended, so the learning rate is {self.lr:.3g}{rises}, "
                f"and ends with {self.lr_final:.3g} at step {self.steps}"
            )
        return (
            f"{change}: the {schedule} schedule is computed anew, so the learning rate continues with {self.lr:.3g} "
            f"instead of {self.lr_before:.3g}, and ends with {self.lr_final:.3g} at step {self.steps}"
        )


def extension_of(resolved: ResolvedJob, record: Mapping[str, Any], step: int, taken: int) -> Extension | None:
    """Return the change of `steps` since the checkpoint with this record, or None if there is none.

    Args:
      resolved: the job.
      record: the checkpoint's record, which contains the resolved job of the earlier process.
      step: the step of the checkpoint.
      taken: optimizer steps taken until then. Skipped batches do not count.
    """
    if not record or record["job"]["steps"] == resolved.steps:
        return None
    before = ResolvedJob(Job.model_validate(record["job"]))
    return Extension(
        step=step,
        steps_before=before.steps,
        steps=resolved.steps,
        lr_before=learning_rate(before, taken),
        lr=learning_rate(resolved, taken),
        lr_final=learning_rate(resolved, taken + max(0, resolved.steps - step - 1)),
    )


def extensions_of(record: Mapping[str, Any], newest: Extension | None) -> dict[str, Any]:
    """Return the entry of all extensions for checkpoints and the summary, or an empty dict if there are none."""
    known = [*record.get(EXTENSIONS, []), *([asdict(newest)] if newest else [])]
    return {EXTENSIONS: known} if known else {}


def learning_rate(resolved: ResolvedJob, taken: int) -> float:
    """Return the learning rate of a resolved job after `taken` optimizer steps."""
    job, shape = resolved.with_values(micro_batch=None).job, MeshShape(1, 1, 1)
    derived = derive(job, shape, None)
    schedule = Schedule.of(job.optimizer, derived.steps, derived.warmup_steps)
    return float(rate_at(job.optimizer.schedule, schedule, np.int32(taken), np))


def require_steps_left(resolved: ResolvedJob, step: int, where: object) -> None:
    """Raise if the job has fewer steps than the run has already taken."""
    job = resolved.job
    if job.steps is not None and job.steps < step:
        raise UserError(
            "E-RUN-024",
            f"steps={job.steps}, but the run has already reached step {step}",
            why=f"the newest checkpoint in {where} is of step {step}, and a run does not go back",
            fix=f"set steps={step} or more, give this job another name (name=...), or start over with --fresh",
        )
