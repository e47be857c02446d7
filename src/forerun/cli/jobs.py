"""`forerun check`, `profile` and `cache`, and the jobs of commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.cli.arguments import options_of
from forerun.errors import UserError
from forerun.exit_codes import USER_MISTAKE
from forerun.verbs.option_types import JobFile, Name, Override, Slices

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
    from forerun.verbs.stage_result import planning_job

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


@options_of("forerun.verbs.check.check:check")
def check(job: JobFile, *overrides: Override, stage: Name | None = None, all: bool = False, **options: Any) -> int:
    """Print the values of a job. If nothing can be derived from them, print them and then the reason.

    Args:
      stage: with stages: show only this stage (default: all)
      all: show all values, including defaults
    """
    stages = chosen_stages(job, overrides, stage)
    for one in stages:
        from forerun.verbs.stages import check_stage

        print(f"{'' if one is stages[0] else chr(10)}stage {one.name}: {one.start_text}\n")
        check_stage(one, **options).print(complete=all)
    if not stages:
        from forerun.verbs.check.check import check_loaded
        from forerun.verbs.job_files import open_job

        check_loaded(open_job(job, overrides), **options).print(complete=all)
    return 0


@options_of("forerun.verbs.profile:profile")
def profile(job: JobFile, *overrides: Override, stage: Name | None = None, **options: Any) -> int:
    """Record the steps, and print the summary and where the trace is.

    Args:
      stage: with stages: the stage to profile
    """
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.job_files import load_job
    from forerun.verbs.profile import profile as profile_job

    stages = chosen_stages(job, overrides, stage)
    require_one(stages, "forerun profile")
    chosen = stages[0].job if stages else load_job(job, *overrides)
    print_warnings(resolve_model(chosen))
    print(f"\n{profile_job(chosen, **options)}")
    return 0


@options_of("forerun.verbs.cache:plan_teacher_cache")
def cache(
    job: JobFile, *overrides: Override, stage: Name | None = None, on: Slices | None = None, **options: Any
) -> int:
    """Compute the caches of teachers, or print their size, time and price on slices.

    Args:
      stage: with stages: the stage whose teacher is cached (default: all that have distil.cache)
    """
    from forerun.verbs.cache import cache_teacher, plan_teacher_cache

    jobs = planned_jobs(job, overrides, stage)
    with_cache = [one for one in jobs if one.method.teacher is not None and not one.method.runs_teacher]
    code = 0
    for one in with_cache if len(jobs) > 1 and with_cache else jobs:
        if not on:
            print(cache_teacher(one))
            continue
        plan = plan_teacher_cache(one, on=on, **options)
        print(plan)
        code = code if plan.fits else USER_MISTAKE
    return code
