"""The cloud's clock. Costs and deadlines depend on it, never on the clock of this machine."""

from __future__ import annotations

import email.utils
import time

FRESH_SECONDS = 5.0
EARLIEST = 1_704_067_200.0  # 2024; an earlier date is not that of a cloud, and would move every deadline


def elapsed_seconds() -> float:
    """Return a time that only grows and that also counts the time in which this machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class CloudClock:
    """The time of the cloud, from the `Date` headers of its answers and the time that passed since the last one."""

    def __init__(self) -> None:
        self._date: float | None = None
        self._received_at = 0.0

    def observe(self, header: str | None, elapsed: float) -> None:
        """Store the `Date` header of an answer that arrived at the local time `elapsed`."""
        try:
            date = email.utils.parsedate_to_datetime(header or "").timestamp()
        except (ValueError, OverflowError):
            return
        if date < EARLIEST:
            return
        self._date, self._received_at = date, elapsed

    def is_fresh(self, elapsed: float) -> bool:
        return self._date is not None and elapsed - self._received_at <= FRESH_SECONDS

    def now(self, elapsed: float) -> float | None:
        """Return the cloud's time in seconds since 1970, or None before the first answer."""
        return None if self._date is None else self._date + max(elapsed - self._received_at, 0.0)
