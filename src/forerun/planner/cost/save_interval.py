"""The number of steps between checkpoints: the default of `checkpoint.every`, and the cost of other values."""

from __future__ import annotations

import math

from forerun.config.schema import Job

SAVES = 10  # saves per run, if they are cheap
CHEAP = 0.01  # saves are cheap if their pauses take at most this share of the time
WASTE = 0.05  # share of the time; an interval that wastes more gets a warning


def best_interval(
    steps: int, step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float
) -> int:
    """Return the number of steps between saves that loses the least time.

    This is the interval of Young and Daly: sqrt(2 x pause of a save x mean time between failures). Two limits apply. No
    save begins before the previous one is written. A short run saves ten times if that costs at most 1 % of its time.

    Args:
        steps: Number of steps of the run.
        step_seconds: Time of one step.
        pause_seconds: Time for which a save stops the run.
        write_seconds: Time to write the save afterwards, while the run continues.
        between_seconds: Mean time between failures.
    """
    daly = _young_daly_seconds(pause_seconds, write_seconds, between_seconds)
    short = max(steps / SAVES * step_seconds, pause_seconds / CHEAP, write_seconds)
    return max(1, min(steps, round(min(daly, short) / step_seconds)))


def young_daly(step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float) -> int:
    """Return the number of steps between saves that loses the least time in a run of any length."""
    return max(1, round(_young_daly_seconds(pause_seconds, write_seconds, between_seconds) / step_seconds))


def _young_daly_seconds(pause_seconds: float, write_seconds: float, between_seconds: float) -> float:
    return max(math.sqrt(2 * pause_seconds * between_seconds), write_seconds)


def lost_share(
    every: int, step_seconds: float, *, pause_seconds: float, write_seconds: float, between_seconds: float
) -> float:
    """Return the share of the time that is lost to saves and to steps repeated after failures."""
    interval = every * step_seconds
    stall = pause_seconds + max(0.0, write_seconds - interval)
    return stall / interval + interval / (2 * between_seconds)


def aligned(job: Job, every: int) -> int:
    """Return the interval, rounded up to a multiple of the evaluation interval if the best checkpoints are kept."""
    if not (job.checkpoint.keep_best and job.data.validation):
        return every
    evaluations = job.validation.every or job.checkpoint.evaluation_steps
    return -(-every // evaluations) * evaluations
