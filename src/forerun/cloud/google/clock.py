"""The cloud's clock. Costs and deadlines depend on it, never on the clock of this machine."""

from __future__ import annotations

import datetime as dt
import email.utils
import re
import time
from collections.abc import Callable

from forerun.cloud.provider import FAILURES

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


_FRACTION = re.compile(r"\.(\d+)")


def seconds_of(timestamp: object) -> float | None:
    """Return a timestamp such as `2026-11-18T10:00:00.123456789Z` in seconds since 1970, or None if it is not one."""
    if not isinstance(timestamp, str):
        return None
    # datetime accepts at most six digits.
    text = _FRACTION.sub(lambda found: f".{found[1][:6]:0<6}", timestamp.strip().replace("Z", "+00:00"))
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else found.replace(tzinfo=dt.UTC).timestamp()


JUMP_SECONDS = 60.0  # a step ahead by more than this must be confirmed by the next answer


class SteadyClock:
    """The time of the cloud, protected against wrong `Date` headers.

    A deadline must come at the latest when this machine has counted its seconds. A cloud clock that falls back to 1970,
    or that is two hours slow, therefore changes nothing. One that jumps ahead may be right, because this machine may
    have been suspended: the jump counts when two answers in sequence tell it.

    Args:
      cloud_time: returns the cloud's time in seconds since 1970.
      elapsed: returns a time of this machine that only grows, and that counts its sleep.
    """

    def __init__(self, cloud_time: Callable[[], float], elapsed: Callable[[], float] = elapsed_seconds) -> None:
        self._cloud_time, self._elapsed = cloud_time, elapsed
        self._now: float | None = None
        self._read_at = self._unconfirmed = 0.0

    def now(self) -> float:
        """Return the time in seconds since 1970.

        Raises:
          CloudUnavailable: The cloud has never told its time.
        """
        estimate = None if self._now is None else self._now + max(self._elapsed() - self._read_at, 0.0)
        try:
            told = self._cloud_time()
        except FAILURES:
            if estimate is None:
                raise
            told = estimate
        now = told
        if estimate is not None:
            ahead = max(told - estimate, 0.0)
            # The smaller one of two jumps in sequence is confirmed. A single one may be a wrong header.
            now = estimate + (ahead if ahead <= JUMP_SECONDS else min(ahead, self._unconfirmed))
            self._unconfirmed = 0.0 if ahead <= JUMP_SECONDS else told - now
        self._now, self._read_at = now, self._elapsed()
        return now
