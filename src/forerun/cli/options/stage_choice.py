"""The option `--stage`: one stage of a job file with stages, as an ordinary job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.config.stages import Stage


def chosen_stages(args: argparse.Namespace) -> tuple[Stage, ...]:
    """Return the stage that `--stage` names, or all stages. Return nothing for a file without stages.

    Raises:
      UserError: the file has no such stage.
    """
    from forerun.config.stages import stage_named
    from forerun.verbs.job_files import open_stages

    stages = open_stages(args.job, args.overrides)
    return stages if args.stage is None else (stage_named(stages, args.stage),)


def planned_jobs(args: argparse.Namespace) -> list[Job]:
    """Return the chosen jobs for a command that reads no weights: those of stages, or the job of the file."""
    stages = chosen_stages(args)
    if not stages:
        from forerun.verbs.job_files import load_job

        return [load_job(args.job, *args.overrides)]
    from forerun.verbs.stages.stage_outline import planning_job

    return [planning_job(stage) for stage in stages]


def require_one(stages: Sequence[Stage], what: str) -> None:
    """Raise if an option for a single job is given with several stages."""
    if len(stages) > 1:
        raise UserError(
            "E-COMMAND-042",
            f"{what} is for one stage",
            why=f"the file has the stages {', '.join(stage.name for stage in stages)}",
            fix="add --stage NAME",
        )
