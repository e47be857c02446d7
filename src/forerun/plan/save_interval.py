"""How many steps lie between two checkpoints: the default of `checkpoint.every`, and what another value costs."""

from __future__ import annotations

import math

from forerun.config.schema import Job

SAVES = 10  # per run, if they are cheap
CHEAP = 0.01  # of the time, lost by pauses
WASTE = 0.05  # of the time, from which on a value is warned about


def best_interval(
    steps: int, step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float
) -> int:
    """Return the number of steps between saves that loses least time.

    It is Young and Daly's: the root of 2 x the pause of a save x the mean time between failures. Two limits apply. No
    save begins before the one before is written. A short run saves ten times if that costs at most 1 % of its time.

    Args:
      pause_seconds: how long a save stops the run.
      write_seconds: how long the save is then written while the run continues.
      between_seconds: mean time between failures.
    """
    daly = max(math.sqrt(2 * pause_seconds * between_seconds), write_seconds)
    short = max(steps / SAVES * step_seconds, pause_seconds / CHEAP, write_seconds)
    return max(1, min(steps, round(min(daly, short) / step_seconds)))


def lost_share(
    every: int, step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float
) -> float:
    """Return the share of the time that saves take and failures destroy."""
    interval = every * step_seconds
    stall = pause_seconds + max(0.0, write_seconds - interval)
    return stall / interval + interval / (2 * between_seconds)


def aligned(job: Job, every: int) -> int:
    """Return the interval, rounded up to whole evaluations if the best checkpoints are chosen by them."""
    if not (job.checkpoint.keep_best and job.data.validation):
        return every
    evaluations = job.validation.every or job.checkpoint.evaluation_steps
    return -(-every // evaluations) * evaluations
