"""The interface of trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

# A line of metrics.jsonl: `step`, `unix_seconds`, metrics that are numbers or null, and `samples`, which is a list of
# objects with the texts `prompt` and `text`.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """The run, as trackers see it.

    `token` identifies the run and stays the same when the run resumes. `job` has the values of the job by key.
    """

    name: str
    folder: Path
    token: str
    job: Mapping[str, Any] = field(repr=False)


class ConnectionLost(OSError):
    """An error after which the tracker must begin again, because it may have lost rows that it accepted."""


class Tracker(Protocol):
    """A destination for metrics.

    One thread calls its methods, which is never the thread of the training loop. An exception is reported to the user,
    and the same call is repeated later. After `ConnectionLost`, `begin` is called again, and all rows after the step
    that it returns are sent again.

    A tracker may also have a method `end(finished)`, which is called at the end of a run if all rows were delivered. It
    raises an exception if the rows are not stored. `end_seconds` is the time that the end of a run waits for it.

    If rows were not delivered, the optional method `close()` is called instead, which must not wait.
    """

    def begin(self, run: TrackedRun) -> int | None:
        """Connect, and return the last step of this run that the tracker has, or None if it cannot know."""

    def send(self, rows: Sequence[Row]) -> None:
        """Store rows, which are sorted by step.

        After an exception, the same rows are sent again, so storing a row twice must not duplicate it.
        """
