"""Everything that a controller knows about a run at one moment. `decide` is a function of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.cloud.control.billing import attempt_limit, attempt_usd
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
# A slice that was seen ready within this time may have run until now. It covers two polls and a repeated call.
RECENTLY_SECONDS = 60.0


@dataclass(frozen=True)
class AttemptView:
    """An attempt as this controller knows it.

    Attributes:
      ready: since when it is billed.
      end: its end, after this controller has verified that the slice is gone.
      recorded_end: the end in the record, before that is verified. It may be forged, and the slice may still exist.
      seen_at: when this controller saw the slice ready for the last time.
      is_foreign: whether the user of this controller did not choose its option.
    """

    entry: AttemptEntry
    ready: ReadyEntry | None = None
    end: EndEntry | None = None
    recorded_end: EndEntry | None = None
    seen_at: float | None = None
    is_foreign: bool = False

    def usd(self, now: float) -> float:
        """Return what the attempt has cost until now. An end that is not verified can only add to it."""
        if self.end is not None:
            return self.end.usd
        ready_at = None if self.ready is None else self.ready.at
        price = self.entry.option.usd_per_hour
        if self.recorded_end is None:
            return attempt_usd(price, ready_at, now, preempted=False)
        seen = attempt_usd(price, ready_at, self.seen_at or 0.0, preempted=False)
        return max(seen, self.recorded_end.usd)


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
      run: what the user has agreed to, with the cap of the record if that is lower.
      attempts: all attempts that are known, in the order of their numbers.
      unknown_usd: the cost of attempts of which only the number is known, because their files are damaged or deleted.
      status: the state of the slice of the attempt that has not ended, if there is one.
      requested_at: when this controller requested the slice of that attempt, or None.
      delivered: whether this controller has delivered the job to the hosts of that attempt.
    """

    now: float
    run: CloudRun
    since: float = 0.0
    attempts: Sequence[AttemptView] = ()
    unknown_usd: Mapping[int, float] = field(default_factory=dict)
    stop: StopEntry | None = None
    finished: FinishEntry | None = None
    status: SliceStatus | None = None
    hosts: Mapping[int, HostReport] = field(default_factory=dict)
    requested_at: float | None = None
    delivered: bool = False

    @property
    def current(self) -> AttemptView | None:
        """The first attempt whose end is not verified. An attempt is created only after the end of all others."""
        return next((one for one in self.attempts if one.end is None), None)

    @property
    def ended(self) -> list[tuple[AttemptEntry, EndEntry]]:
        return [(one.entry, one.end) for one in self.attempts if one.end is not None]

    @property
    def spent_usd(self) -> float:
        """What all ended attempts cost."""
        return sum(end.usd for _, end in self.ended) + sum(self.unknown_usd.values())

    @property
    def keeper_usd(self) -> float:
        """What the keeper has cost until now."""
        return keeper_usd(self.run, self.now)

    @property
    def cost_usd(self) -> float:
        """What the run has cost until now, with the attempt that has not ended and the keeper."""
        return sum(one.usd(self.now) for one in self.attempts) + sum(self.unknown_usd.values()) + self.keeper_usd

    @property
    def deadline(self) -> float | None:
        """When the budget of the current attempt is used up."""
        current = self.current
        if current is None or current.ready is None:
            return None
        return attempt_deadline(self.run, current.entry, current.ready.at)

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
        """The latest time at which a slice that no longer runs can have ended, as far as the record tells it.

        The record cannot make it earlier than the last time at which this controller saw the slice ready. If that was
        a moment ago, the slice may have run until now, and its hosts may have hung before.
        """
        current = self.current
        end = self.now
        if current is not None and current.ready is not None:
            if current.seen_at is not None and end - current.seen_at <= RECENTLY_SECONDS:
                return max(end, current.ready.at)
            if self.hosts:
                end = min(end, max(host.entry.at for host in self.hosts.values()) + REPORT_SECONDS)
            if current.recorded_end is not None:
                end = min(end, current.recorded_end.at)
            if self.deadline is not None:
                end = min(end, self.deadline + REPORT_SECONDS)
            end = max(end, current.ready.at, current.seen_at or 0.0)
        return end

    @property
    def preemptions(self) -> int:
        return sum(end.reason == ENDED_PREEMPTED for _, end in self.ended)


def keeper_usd(run: CloudRun, now: float) -> float:
    """Return what the keepers of a run have cost until now."""
    if run.keeper_at is None:
        return run.keeper_spent_usd
    return run.keeper_spent_usd + run.keeper_usd_per_hour * max(now - run.keeper_at, 0.0) / 3600


def attempt_deadline(run: CloudRun, entry: AttemptEntry, ready_at: float) -> float | None:
    """Return when the budget of an attempt is used up, or None without a limit. A lower cap of the run shortens it."""
    limits = [entry.limit_seconds, attempt_limit(run, entry.spent_usd, entry.option)]
    return deadline_at(ready_at, min((limit for limit in limits if limit is not None), default=None))
