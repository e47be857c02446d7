"""When each of the limits of an attempt acts. All times are those of the cloud's clock, in seconds since 1970."""

from __future__ import annotations

import math
from collections.abc import Sequence

GRACE_SECONDS = 60.0
SAVE_MARGIN = 1.5
LONGEST_SAVE_SECONDS = 3600.0  # a longer time is not credible
DELETE_SECONDS = 30.0  # before the deadline, an agent deletes the slice even if training has not stopped
HOST_DELAY_SECONDS = 15.0  # host I waits I times as long, so that the hosts do not all delete the slice


def credible_save_seconds(value: object) -> float | None:
    """Return the time of a save that a file claims, or None if no save can have taken it.

    It decides when training stops, so NaN or 1e308 must not move the stop.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0.0 <= value <= LONGEST_SAVE_SECONDS else None


def grace_seconds(save_seconds: float | None) -> float:
    """Return how long before the deadline training is stopped, from the measured time of a save."""
    return GRACE_SECONDS + SAVE_MARGIN * (credible_save_seconds(save_seconds) or 0.0)


def host_delay_seconds(host: int, grace: float) -> float:
    """Return how much later than host 0 a host acts. Every host acts before the deadline."""
    return min(HOST_DELAY_SECONDS * host, grace / 2)


def deadline_at(ready_at: float, limit_seconds: float | None) -> float | None:
    """Return the time at which the budget of an attempt is used up, or None without a limit."""
    return None if limit_seconds is None else ready_at + limit_seconds


def host_deadline_at(
    now: float | None,
    elapsed_seconds: float,
    delivered_at: float | None,
    ready_times: Sequence[float | None],
    limits: Sequence[float | None],
) -> float | None:
    """Return the earliest deadline that a host knows, or None without a limit.

    No value can move the deadline of another one back. A forged or missing record therefore prolongs nothing.

    Args:
      now: the time; None: not known yet. Then the result is the time that remains.
      elapsed_seconds: the time since this host started forerun first. The limit also holds from then on, because
        billing began before.
      delivered_at: the deadline that the controller delivered.
      ready_times: when billing began, from several sources.
      limits: how long the slice may be billed, from several sources.
    """
    known_limits = [float(limit) for limit in limits if limit is not None and math.isfinite(limit)]
    times = [] if now is None or delivered_at is None else [delivered_at]
    if known_limits:
        limit_seconds = min(known_limits)
        times.append((now or 0.0) + limit_seconds - elapsed_seconds)
        if now is not None:
            times += [at + limit_seconds for at in ready_times if at is not None and math.isfinite(at)]
    return min(times, default=None)
