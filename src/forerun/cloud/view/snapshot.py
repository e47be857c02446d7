"""The record of a run at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from forerun.cloud.control.billing import attempt_usd
from forerun.cloud.record.entries import (
    ENDED_BUDGET,
    ENDED_FAILED,
    ENDED_FINISHED,
    ENDED_STOPPED,
    AttemptEntry,
    CloudRun,
    EndEntry,
    FinishEntry,
    HostEntry,
    LeaseEntry,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.record.run_files import RunFiles

CONCURRENT_READS = 16


@dataclass(frozen=True)
class RecordSnapshot:
    """What the record of a run contains. `hosts` are the reports of the newest attempt."""

    run: CloudRun
    attempts: Mapping[int, AttemptEntry] = field(default_factory=dict)
    ready: Mapping[int, ReadyEntry] = field(default_factory=dict)
    ends: Mapping[int, EndEntry] = field(default_factory=dict)
    hosts: Mapping[int, HostEntry] = field(default_factory=dict)
    stop: StopEntry | None = None
    finished: FinishEntry | None = None
    lease: LeaseEntry | None = None

    @property
    def newest(self) -> AttemptEntry | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def open_attempts(self) -> tuple[AttemptEntry, ...]:
        """The attempts whose deletion is not recorded yet."""
        return tuple(entry for number, entry in self.attempts.items() if number not in self.ends)

    @property
    def end_reason(self) -> str | None:
        """Why the run has ended, with all slices deleted; None if it has not, or if a controller may continue it."""
        if self.open_attempts:
            return None
        if self.finished is not None:
            return ENDED_FINISHED
        last = self.ends[max(self.ends)].reason if self.ends else ""
        if last in (ENDED_FAILED, ENDED_BUDGET):
            return last
        return None if self.stop is None else ENDED_STOPPED

    @property
    def is_over(self) -> bool:
        return self.end_reason is not None

    @property
    def step(self) -> int | None:
        """The newest step that a host has reported."""
        return max((host.step for host in self.hosts.values() if host.step is not None), default=None)

    def deadline(self, attempt: int) -> float | None:
        """Return the time at which the API or a host deletes the slice, or None without a limit."""
        entry, ready = self.attempts[attempt], self.ready.get(attempt)
        return None if ready is None or entry.limit_seconds is None else ready.at + entry.limit_seconds

    def usd(self, now: float) -> float:
        """Return what all attempts and the keeper have cost up to now."""
        return sum(self.attempt_usd(number, now) for number in self.attempts) + self.keeper_usd(now)

    def keeper_usd(self, now: float) -> float:
        """Return what the keeper has cost up to now. It ends with the run."""
        if self.run.keeper_at is None:
            return self.run.keeper_spent_usd
        until = max((end.at for end in self.ends.values()), default=now) if self.is_over else now
        hours = max(0.0, until - self.run.keeper_at) / 3600
        return self.run.keeper_spent_usd + self.run.keeper_usd_per_hour * hours

    def attempt_usd(self, attempt: int, now: float) -> float:
        """Return what one attempt has cost up to now."""
        if (end := self.ends.get(attempt)) is not None:
            return end.usd
        ready = self.ready.get(attempt)
        if ready is None:
            return 0.0
        return attempt_usd(self.attempts[attempt].option.usd_per_hour, ready.at, now, preempted=False)

    def controller(self, now: float) -> str | None:
        """Return the controller that acts at present, or None if no controller does."""
        return self.lease.holder if self.lease is not None and self.lease.until > now else None

    def report_age_seconds(self, now: float) -> float | None:
        """Return the time since the last report of any host of the newest attempt."""
        return max(0.0, now - max(host.at for host in self.hosts.values())) if self.hosts else None


def read_snapshot(files: RunFiles) -> RecordSnapshot | None:
    """Read the record of a run, or return None if the folder has none. Raise ValueError if it is damaged."""
    run = files.run()
    if run is None:
        return None
    attempts = files.attempts()
    newest = attempts[max(attempts)] if attempts else None
    with ThreadPoolExecutor(CONCURRENT_READS) as pool:
        ready = {number: pool.submit(files.ready, number) for number in attempts}
        ends = {number: pool.submit(files.end, number) for number in attempts}
        stop, finished, lease = pool.submit(files.stop), pool.submit(files.finished), pool.submit(files.lease)
        hosts = pool.submit(files.hosts, newest.number, newest.option.hosts) if newest else None
        return RecordSnapshot(
            run=run,
            attempts=attempts,
            ready={number: found for number, one in ready.items() if (found := one.result()) is not None},
            ends={number: end for number, one in ends.items() if (end := one.result()) is not None},
            hosts=hosts.result() if hosts else {},
            stop=stop.result(),
            finished=finished.result(),
            lease=lease.result(),
        )
