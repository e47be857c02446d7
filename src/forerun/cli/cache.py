"""`forerun cache`: store the logits of a teacher once, so that students can learn from them."""

from __future__ import annotations

from typing import Any

from forerun.cli.arguments import options_of
from forerun.cli.stage_choice import planned_jobs
from forerun.exit_codes import USER_MISTAKE
from forerun.verbs.option_types import JobFile, Name, Override, Slices


@options_of("forerun.verbs.cache.cache:plan_teacher_cache")
def cache(
    job: JobFile, *overrides: Override, stage: Name | None = None, on: Slices | None = None, **options: Any
) -> int:
    """Compute the caches of teachers, or print their size, time and price on slices.

    Args:
      stage: with stages: the stage whose teacher is cached (default: all that have distil.cache)
      on: only predict size, time and price on these slices, for example v6e-1
    """
    from forerun.verbs.cache.cache import cache_teacher, plan_teacher_cache

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
