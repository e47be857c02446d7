"""When each of the limits of an attempt acts. All times are those of the cloud's clock, in seconds since 1970."""

from __future__ import annotations

GRACE_SECONDS = 60.0
SAVE_MARGIN = 1.5
DELETE_SECONDS = 30.0  # before the deadline, an agent deletes the slice even if training has not stopped
HOST_DELAY_SECONDS = 15.0  # host I waits I times as long, so that the hosts do not all delete the slice


def grace_seconds(save_seconds: float | None) -> float:
    """Return how long before the deadline training is stopped, from the measured time of a save."""
    return GRACE_SECONDS + SAVE_MARGIN * (save_seconds or 0.0)


def host_delay_seconds(host: int, grace: float) -> float:
    """Return how much later than host 0 a host acts. Every host acts before the deadline."""
    return min(HOST_DELAY_SECONDS * host, grace / 2)


def deadline_at(ready_at: float, limit_seconds: float | None) -> float | None:
    """Return the time at which the budget of an attempt is used up, or None without a limit."""
    return None if limit_seconds is None else ready_at + limit_seconds
