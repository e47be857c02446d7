"""Extensions: a run that resumes with another number of steps, the effect on its schedule, and the record of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.program.derive import derive
from forerun.program.schedule import Schedule, rate_at

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


def extension_of(job: Job, record: Mapping[str, Any], step: int, taken: int) -> Extension | None:
    """Return the change of `steps` since the checkpoint with this record, or None if there is none.

    Args:
      job: the resolved job.
      record: the checkpoint's record, which contains the resolved job of the earlier process.
      step: the step of the checkpoint.
      taken: optimizer steps taken until then. Skipped batches do not count.
    """
    if "job" not in record or record["job"]["steps"] == job.steps:
        return None
    before = Job.model_validate(record["job"])
    assert before.steps is not None
    assert job.steps is not None
    return Extension(
        step=step,
        steps_before=before.steps,
        steps=job.steps,
        lr_before=learning_rate(before, taken),
        lr=learning_rate(job, taken),
        lr_final=learning_rate(job, taken + max(0, job.steps - step - 1)),
    )


def extensions_of(record: Mapping[str, Any], newest: Extension | None) -> dict[str, Any]:
    """Return the entry of all extensions for checkpoints and the summary, or an empty dict if there are none."""
    known = [*record.get(EXTENSIONS, []), *([asdict(newest)] if newest else [])]
    return {EXTENSIONS: known} if known else {}


def learning_rate(job: Job, taken: int) -> float:
    """Return the learning rate of a resolved job after `taken` optimizer steps."""
    derived = derive(job.model_copy(update={"micro_batch": None}), MeshShape(1, 1, 1), None)
    schedule = Schedule.of(job.optimizer, derived.steps, derived.warmup_steps)
    return float(rate_at(job.optimizer.schedule, schedule, np.int32(taken), np))


def require_steps_left(job: Job, step: int, where: object) -> None:
    """Raise if the job has fewer steps than the run has already taken."""
    if job.steps is not None and job.steps < step:
        raise UserError(
            "E-RUN-024",
            f"steps={job.steps}, but the run has already reached step {step}",
            why=f"the newest checkpoint in {where} is of step {step}, and a run does not go back",
            fix=f"set steps={step} or more, give this job another name (name=...), or start over with --fresh",
        )
