"""`forerun profile`: record a few steps of a job with the JAX profiler, without a run."""

from __future__ import annotations

from typing import Any

from forerun.cli.arguments import options_of
from forerun.cli.stage_choice import chosen_stages, print_warnings, require_one
from forerun.verbs.option_types import JobFile, Name, Override


@options_of("forerun.verbs.profile.profile:profile")
def profile(job: JobFile, *overrides: Override, stage: Name | None = None, **options: Any) -> int:
    """Record the steps, and print the summary and where the trace is.

    Args:
      stage: with stages: the stage to profile
    """
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.job_files import load_job
    from forerun.verbs.profile.profile import profile as profile_job

    stages = chosen_stages(job, overrides, stage)
    require_one(stages, "forerun profile")
    chosen = stages[0].job if stages else load_job(job, *overrides)
    print_warnings(resolve_model(chosen))
    print(f"\n{profile_job(chosen, **options)}")
    return 0
