"""The record of a run at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.cloud.control.billing import attempt_usd
from forerun.cloud.labels import resource_name
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
from forerun.cloud.record.read_entry import DamagedEntry, undamaged
from forerun.cloud.record.run_files import RunFiles


@dataclass(frozen=True)
class RecordSnapshot:
    """What the record of a run contains.

    Attributes:
      hosts: the reports of the newest attempt.
      damaged: the files without a valid entry. The other attributes do not contain them.
    """

    run: CloudRun
    attempts: Mapping[int, AttemptEntry] = field(default_factory=dict)
    ready: Mapping[int, ReadyEntry] = field(default_factory=dict)
    ends: Mapping[int, EndEntry] = field(default_factory=dict)
    hosts: Mapping[int, HostEntry] = field(default_factory=dict)
    stop: StopEntry | None = None
    finished: FinishEntry | None = None
    lease: LeaseEntry | None = None
    damaged: tuple[DamagedEntry, ...] = ()

    @property
    def newest(self) -> AttemptEntry | None:
        return self.attempts[max(self.attempts)] if self.attempts else None

    @property
    def open_attempts(self) -> tuple[AttemptEntry, ...]:
        """The attempts whose deletion is not recorded yet."""
        return tuple(entry for number, entry in self.attempts.items() if number not in self.ends)

    @property
    def end_reason(self) -> str | None:
        """Why the run has ended, with all slices deleted; None if a controller may continue it or a file is damaged."""
        if self.open_attempts or self.damaged:
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
        return self.lease.holder if self.lease is not None and self.lease.is_held(now) else None

    def report_age_seconds(self, now: float) -> float | None:
        """Return the time since the last report of any host of the newest attempt."""
        return max(0.0, now - max(host.at for host in self.hosts.values())) if self.hosts else None


def read_snapshot(files: RunFiles) -> RecordSnapshot | DamagedEntry | None:
    """Read the record of a run. Return None if the folder has none, or the file `run.json` if that is damaged."""
    run = files.run()
    if run is None or isinstance(run, DamagedEntry):
        return run
    recorded = {number: _own_attempt(run, number, entry, files) for number, entry in files.attempts().items()}
    attempts = {number: entry for number, entry in recorded.items() if isinstance(entry, AttemptEntry)}
    newest = attempts[max(attempts)] if attempts else None
    ready, ends, stop, finished, lease = files.progress(recorded)
    hosts = files.hosts(newest.number, newest.option.hosts) if newest else {}
    entries: tuple[object, ...] = (*recorded.values(), *ready.values(), *ends.values())
    entries += (*hosts.values(), stop, finished, lease)
    return RecordSnapshot(
        run=run,
        attempts=attempts,
        ready={number: entry for number, entry in ready.items() if isinstance(entry, ReadyEntry)},
        ends={number: entry for number, entry in ends.items() if isinstance(entry, EndEntry)},
        hosts={host: entry for host, entry in hosts.items() if isinstance(entry, HostEntry)},
        stop=undamaged(stop),
        finished=undamaged(finished),
        lease=undamaged(lease),
        damaged=tuple(entry for entry in entries if isinstance(entry, DamagedEntry)),
    )


def _own_attempt(
    run: CloudRun, number: int, entry: AttemptEntry | DamagedEntry, files: RunFiles
) -> AttemptEntry | DamagedEntry:
    """Return the entry of an attempt, or DamagedEntry if it names another resource than that of the attempt.

    `forerun down` deletes the resource that an open attempt names. A forged name must not delete other machines.
    """
    if isinstance(entry, DamagedEntry) or entry.resource == resource_name(run.name, number):
        return entry
    return DamagedEntry(f"{files.files.address}/attempts/{number:03}.json", "its resource is not that of the attempt")
