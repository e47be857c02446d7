"""The retry policies of all storage. No other module defines a number of tries or a delay for a bucket.

| policy | who waits | how long |
| --- | --- | --- |
| `REQUEST_RETRIES` | a request, in the driver | about 40 seconds |
| `ARRAY_RETRIES` | a request for the arrays of a checkpoint, in the driver | about 15 minutes |
| `READS` | a read of training data whose answers fail or are too short | 3 minutes |
| `HUB_READS` | a read of a dataset on the hub by ranges | a minute |
| `RetrySchedule()` | the save or the restore of a checkpoint | an hour |

A failure that is still there after its time is raised as `StorageUnavailable`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from forerun.errors import StorageError
from forerun.reporter import Reporter
from forerun.units import Seconds

T = TypeVar("T")

# A longer outage ends a command with an error, or is waited for by one of the schedules below.
REQUEST_RETRIES = {"max_retries": 10, "initial_delay": "200ms", "max_delay": "8s"}
# Hosts that save together cannot repeat a save one by one, so their requests must survive a longer outage.
ARRAY_RETRIES = {"max_retries": 32, "initial_delay": "1s", "max_delay": "32s"}
SILENT_SECONDS = 60  # a connection without any data for this long is closed, and the request is tried again


class StorageUnavailable(StorageError, OSError):
    """The storage does not answer now, and another try may succeed. This is no sign of damage."""


@dataclass(frozen=True)
class RetrySchedule:
    """The schedule of retries. The delay is doubled after each try.

    By default, an outage of an hour is waited for. A longer one probably needs the user's attention.
    """

    first_seconds: float = 1.0  # delay after the first try
    most_seconds: float = 60.0  # maximum delay
    total_seconds: float = 3600.0  # no try begins later than this after the first one


NONE = RetrySchedule(total_seconds=0.0)  # no retries
READS = RetrySchedule(first_seconds=0.1, most_seconds=10.0, total_seconds=180.0)
HUB_READS = RetrySchedule(first_seconds=0.5, most_seconds=5.0, total_seconds=60.0)


def with_retries(call: Callable[[], T], schedule: RetrySchedule, reporter: Reporter) -> T:
    """Return the result of `call`, which is repeated while it raises `StorageUnavailable`.

    Args:
      call: the function to call.
      schedule: the schedule of retries.
      reporter: receives a line for each failed try, and one when a later try succeeds.

    Raises:
      StorageUnavailable: the last try failed, too.
    """
    began = time.monotonic()
    delay = schedule.first_seconds
    tries = 0
    while True:
        try:
            result = call()
        except StorageUnavailable as error:
            tries += 1
            waited = time.monotonic() - began
            pause = delay * random.uniform(0.5, 1.0)  # hosts that failed together do not repeat together
            if waited + delay > schedule.total_seconds:
                raise
            left = Seconds(schedule.total_seconds - waited)
            reporter.warn(
                f"{error.what} ({error.why}); try {tries} failed, next try in {Seconds(pause)}, giving up in {left}"
            )
        else:
            if tries:
                reporter.warn(f"the storage answers again, after {Seconds(time.monotonic() - began)}")
            return result
        time.sleep(pause)
        delay = min(2 * delay, schedule.most_seconds)
