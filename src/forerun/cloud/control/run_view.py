"""Everything that a controller knows about a run at one moment. `decide` is a function of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.cloud.control.billing import attempt_usd
from forerun.cloud.deadline import deadline_at, grace_seconds
from forerun.cloud.provider import SliceStatus
from forerun.cloud.record.entries import (
    ENDED_PREEMPTED,
    AttemptEntry,
    CloudRun,
    EndEntry,
    FinishEntry,
    HostEntry,
    ReadyEntry,
    StopEntry,
)

REPORT_SECONDS = 30.0  # a host reports more often than this


@dataclass(frozen=True)
class AttemptView:
    """An attempt, with its start and end of billing as far as they are recorded."""

    entry: AttemptEntry
    ready: ReadyEntry | None = None
    end: EndEntry | None = None


@dataclass(frozen=True)
class HostReport:
    """A host's last report.

    Attributes:
      silent_seconds: how long this controller has seen no new report.
      phase_seconds: how long this controller has seen the phase of the report.
    """

    entry: HostEntry
    silent_seconds: float = 0.0
    phase_seconds: float = 0.0


@dataclass(frozen=True)
class ControlView:
    """A run at one moment.

    Attributes:
      now: the time of the cloud's clock.
      since: when the user started the run or resumed it; refusals before it are not counted.
      attempts: all attempts, in the order of their numbers.
      status: the state of the slice of the attempt that has not ended, if there is one.
      requested_at: when this controller requested the slice of that attempt, or None.
      delivered: whether this controller has delivered the job to the hosts of that attempt.
    """

    now: float
    run: CloudRun
    since: float = 0.0
    attempts: Sequence[AttemptView] = ()
    stop: StopEntry | None = None
    finished: FinishEntry | None = None
    status: SliceStatus | None = None
    hosts: Mapping[int, HostReport] = field(default_factory=dict)
    requested_at: float | None = None
    delivered: bool = False

    @property
    def current(self) -> AttemptView | None:
        """The attempt that has not ended. A controller creates an attempt only after the end of all others."""
        return next((one for one in reversed(self.attempts) if one.end is None), None)

    @property
    def ended(self) -> list[tuple[AttemptEntry, EndEntry]]:
        return [(one.entry, one.end) for one in self.attempts if one.end is not None]

    @property
    def spent_usd(self) -> float:
        """What all ended attempts cost."""
        return sum(end.usd for _, end in self.ended)

    @property
    def keeper_usd(self) -> float:
        """What the keeper has cost until now."""
        run = self.run
        if run.keeper_at is None:
            return run.keeper_spent_usd
        return run.keeper_spent_usd + run.keeper_usd_per_hour * max(self.now - run.keeper_at, 0.0) / 3600

    @property
    def cost_usd(self) -> float:
        """What the run has cost until now, with the attempt that has not ended and the keeper."""
        current = self.current
        spent = self.spent_usd + self.keeper_usd
        if current is None or current.ready is None:
            return spent
        return spent + attempt_usd(current.entry.option.usd_per_hour, current.ready.at, self.now, preempted=False)

    @property
    def deadline(self) -> float | None:
        """When the budget of the current attempt is used up."""
        current = self.current
        if current is None or current.ready is None:
            return None
        return deadline_at(current.ready.at, current.entry.limit_seconds)

    @property
    def grace(self) -> float:
        return grace_seconds(max((host.entry.save_seconds or 0.0 for host in self.hosts.values()), default=None))

    @property
    def stop_at(self) -> float | None:
        """When the controller stops the current attempt. The hosts stop it one grace later, the API two."""
        return None if self.deadline is None else self.deadline - 2 * self.grace

    @property
    def step(self) -> int | None:
        steps = [host.entry.step for host in self.hosts.values() if host.entry.step is not None]
        return max(steps, default=None)

    @property
    def latest_end(self) -> float:
        """The latest time at which a slice that no longer runs can have ended, as far as reports tell it."""
        current = self.current
        end = self.now
        if current is not None and current.ready is not None:
            if self.hosts:
                end = min(end, max(host.entry.at for host in self.hosts.values()) + REPORT_SECONDS)
            if self.deadline is not None:
                end = min(end, self.deadline + REPORT_SECONDS)
            end = max(end, current.ready.at)
        return end

    @property
    def preemptions(self) -> int:
        return sum(end.reason == ENDED_PREEMPTED for _, end in self.ended)
