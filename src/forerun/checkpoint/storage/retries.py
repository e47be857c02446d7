"""Retries of calls to a storage place that does not answer, with exponential backoff."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from forerun.errors import StorageError
from forerun.units import Seconds

T = TypeVar("T")


class StorageUnavailable(StorageError, OSError):
    """The place does not answer now, and another try may succeed. This is no sign of damage."""


@dataclass(frozen=True)
class RetrySchedule:
    """The schedule of retries. The delay is doubled after each try.

    By default, an outage of half an hour is waited out. A longer one probably needs the user's attention.
    """

    first_seconds: float = 1.0  # delay after the first try
    most_seconds: float = 60.0  # maximum delay
    total_seconds: float = 3600.0  # no try begins later than this after the first one


NONE = RetrySchedule(total_seconds=0.0)  # no retries


def with_retries(call: Callable[[], T], patience: RetrySchedule, tell: Callable[[str], None]) -> T:
    """Return the result of `call`, which is repeated while it raises `StorageUnavailable`.

    Args:
      call: the function to call.
      patience: the schedule of retries.
      tell: receives a line for each failed try, and one when a later try succeeds.

    Raises:
      StorageUnavailable: the last try failed, too.
    """
    began = time.monotonic()
    delay = patience.first_seconds
    tries = 0
    while True:
        try:
            found = call()
        except StorageUnavailable as error:
            tries += 1
            waited = time.monotonic() - began
            if waited + delay > patience.total_seconds:
                raise
            left = Seconds(patience.total_seconds - waited)
            tell(f"{error.what} ({error.why}); try {tries} failed, next try in {Seconds(delay)}, giving up in {left}")
        else:
            if tries:
                tell(f"the storage answers again, after {Seconds(time.monotonic() - began)}")
            return found
        time.sleep(delay)
        delay = min(2 * delay, patience.most_seconds)
