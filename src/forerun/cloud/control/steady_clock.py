"""The cloud's clock as a controller uses it: it never runs backwards, and never slower than this machine's clock."""

from __future__ import annotations

from collections.abc import Callable

from forerun.cloud.control.failures import FAILURES
from forerun.cloud.google.clock import elapsed_seconds

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
