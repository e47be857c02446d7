"""`forerun check`: print every value of a job, where it came from, and what follows from it."""

from __future__ import annotations

from typing import Any

from forerun.cli.arguments import options_of
from forerun.cli.stage_choice import chosen_stages
from forerun.verbs.option_types import JobFile, Name, Override


@options_of("forerun.verbs.check.check:check")
def check(job: JobFile, *overrides: Override, stage: Name | None = None, all: bool = False, **options: Any) -> int:
    """Print the values of a job. If nothing can be derived from them, print them and then the reason.

    Args:
      stage: with stages: show only this stage (default: all)
      all: show all values, including defaults
    """
    stages = chosen_stages(job, overrides, stage)
    for one in stages:
        from forerun.verbs.stages.stages import check_stage

        print(f"{'' if one is stages[0] else chr(10)}stage {one.name}: {one.start_text}\n")
        check_stage(one, **options).print(complete=all)
    if not stages:
        from forerun.verbs.check.check import check_loaded
        from forerun.verbs.job_files import open_job

        check_loaded(open_job(job, overrides), **options).print(complete=all)
    return 0
