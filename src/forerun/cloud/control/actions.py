"""The actions of a controller. Each is idempotent: a controller that was killed may repeat it."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.cloud.provider import Failure
from forerun.cloud.record.entries import AttemptEntry


@dataclass(frozen=True)
class StartAttempt:
    """Record a new attempt. The slice is requested later, so that every slice has a record before it exists."""

    entry: AttemptEntry


@dataclass(frozen=True)
class RequestSlice:
    entry: AttemptEntry


@dataclass(frozen=True)
class RecordReady:
    entry: AttemptEntry
    at: float


@dataclass(frozen=True)
class DeliverJob:
    """Copy the job, its data and its secrets to the hosts over ssh."""

    entry: AttemptEntry


@dataclass(frozen=True)
class RequestStop:
    """Ask the hosts to save a checkpoint and to stop."""

    reason: str


@dataclass(frozen=True)
class EndAttempt:
    """Delete the slice, verify it, and record the end.

    Attributes:
      at: when billing ended, if the slice does not run any more; None: when it is deleted.
      is_preempted: the cloud has taken the machines. A slice that is absent may have been deleted by its own hosts.
    """

    entry: AttemptEntry
    reason: str
    detail: str = ""
    failure: Failure | None = None
    at: float | None = None
    is_preempted: bool = False


@dataclass(frozen=True)
class Pause:
    """Do nothing until the next look. `until` is a time of the cloud's clock, for the display."""

    why: str = ""
    until: float | None = None


@dataclass(frozen=True)
class EndRun:
    """Nothing is left to do."""

    reason: str
    detail: str = ""


Action = StartAttempt | RequestSlice | RecordReady | DeliverJob | RequestStop | EndAttempt | Pause | EndRun
