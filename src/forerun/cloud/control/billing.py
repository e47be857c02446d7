"""What an attempt costs, and how long it may run. Pure functions; all times are those of the cloud's clock."""

from __future__ import annotations

import math

from forerun.cloud.deadline import grace_seconds
from forerun.cloud.record.entries import AttemptEntry, CloudRun, Option

FREE_SECONDS = 60.0  # a slice that is preempted within its first minute is not billed
USEFUL_SECONDS = 60.0  # an attempt that can train for less than this is not started
SECONDS_PER_HOUR = 3600.0
KEEPER_WAIT_SECONDS = 6 * 3600.0  # a keeper costs money while it waits: then the limit is computed again


def attempt_usd(usd_per_hour: float, ready_at: float | None, end_at: float, *, preempted: bool) -> float:
    """Return what an attempt costs: from the time it was ready until its deletion or preemption."""
    if ready_at is None:
        return 0.0
    seconds = max(end_at - ready_at, 0.0)
    if preempted and seconds <= FREE_SECONDS:
        return 0.0
    return usd_per_hour * seconds / SECONDS_PER_HOUR


def limit_seconds(max_usd: float | None, spent_usd: float, usd_per_hour: float) -> int | None:
    """Return how long an attempt may be billed, in complete seconds; None if there is no cap or no price."""
    if max_usd is None or usd_per_hour <= 0:
        return None
    return max(math.floor((max_usd - spent_usd) / usd_per_hour * SECONDS_PER_HOUR + 1e-6), 0)


def attempt_limit(run: CloudRun, spent_usd: float, option: Option) -> int | None:
    """Return how long an attempt may be billed together with the run's keeper, in complete seconds.

    Args:
      spent_usd: what earlier attempts and the keeper have cost.
    """
    keeper = run.keeper_usd_per_hour if run.keeper else 0.0
    reserve = keeper * KEEPER_WAIT_SECONDS / SECONDS_PER_HOUR  # what the keeper may cost before the slice is ready
    return limit_seconds(run.max_usd, spent_usd + reserve, option.usd_per_hour + keeper)


def limit_usd(run: CloudRun, entry: AttemptEntry) -> float:
    """Return the most that an attempt can cost; without a limit, the cap of the run."""
    if entry.limit_seconds is None:
        return run.max_usd or 0.0
    return entry.option.usd_per_hour * entry.limit_seconds / SECONDS_PER_HOUR


def is_useful(limit: int | None) -> bool:
    """Return whether an attempt with this limit has time to train before the controller must stop it."""
    return limit is None or limit >= 2 * grace_seconds(None) + USEFUL_SECONDS


def least_usd(usd_per_hour: float) -> float:
    """Return the smallest budget with which an attempt at this price is started."""
    return usd_per_hour * (2 * grace_seconds(None) + USEFUL_SECONDS) / SECONDS_PER_HOUR
