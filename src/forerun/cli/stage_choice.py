"""The jobs of a command: those of a job file, or of the stage that `--stage` names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.config.stages import Stage
    from forerun.resolve.resolved_job import ResolvedJob


def chosen_stages(job: str, overrides: Sequence[str], stage: str | None) -> tuple[Stage, ...]:
    """Return the stage that `--stage` names, or all stages. Return nothing for a file without stages.

    Raises:
      UserError: the file has no such stage.
    """
    from forerun.config.stages import stage_named
    from forerun.verbs.job_files import open_stages

    stages = open_stages(job, overrides)
    return stages if stage is None else (stage_named(stages, stage),)


def planned_jobs(job: str, overrides: Sequence[str], stage: str | None) -> list[Job]:
    """Return the chosen jobs for a command that reads no weights: those of stages, or the job of the file."""
    stages = chosen_stages(job, overrides, stage)
    if not stages:
        from forerun.verbs.job_files import load_job

        return [load_job(job, *overrides)]
    from forerun.verbs.stages.stage_outline import planning_job

    return [planning_job(one) for one in stages]


def require_one(stages: Sequence[Stage], what: str) -> None:
    """Raise if an option for a single job is given with several stages."""
    if len(stages) > 1:
        raise UserError(
            "E-COMMAND-042",
            f"{what} is for one stage",
            why=f"the file has the stages {', '.join(stage.name for stage in stages)}",
            fix="add --stage NAME",
        )


def print_warnings(resolved: ResolvedJob) -> None:
    """Print what is probably a mistake in the job, apart from what the command writes to stdout."""
    from forerun.methods.job_notes import warnings_of

    for text in warnings_of(resolved):
        print(f"warning: {text}", file=sys.stderr, flush=True)
