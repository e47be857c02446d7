"""How long a place that does not answer is waited for, and how that is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from forerun.errors import StorageError
from forerun.units import Seconds

T = TypeVar("T")


class Away(StorageError, OSError):
    """The place does not answer at the moment: another try may succeed. Nothing says that anything is damaged."""


@dataclass(frozen=True)
class Patience:
    """Tries are `first_seconds` apart, then twice as far each time up to `most_seconds`, for `total_seconds` in all.

    A bucket that is away for half an hour is waited for; what answers after that long has a cause to be looked at.
    """

    first_seconds: float = 1.0
    most_seconds: float = 60.0
    total_seconds: float = 3600.0


NONE = Patience(total_seconds=0.0)


def patiently(call: Callable[[], T], patience: Patience, tell: Callable[[str], None]) -> T:
    """What `call` returns, tried again while it raises `Away`. Measured by the monotonic clock."""
    began = time.monotonic()
    delay = patience.first_seconds
    tries = 0
    while True:
        try:
            found = call()
        except Away as error:
            tries += 1
            waited = time.monotonic() - began
            if waited + delay > patience.total_seconds:
                raise
            left = Seconds(patience.total_seconds - waited)
            tell(f"{error.what} ({error.why}); try {tries} failed, the next in {Seconds(delay)}, for {left} at most")
        else:
            if tries:
                tell(f"it answers again, after {Seconds(time.monotonic() - began)}")
            return found
        time.sleep(delay)
        delay = min(2 * delay, patience.most_seconds)
