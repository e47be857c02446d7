"""Reading of the record and of the slice's state, as the view on which a controller decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from forerun.cloud.control.billing import attempt_limit, limit_usd
from forerun.cloud.control.ledger import LedgerAttempt, RunLedger
from forerun.cloud.control.run_view import AttemptView, ControlView, HostReport, keeper_usd
from forerun.cloud.labels import resource_name
from forerun.cloud.provider import Provider, SliceState, SliceStatus
from forerun.cloud.record.entries import (
    ENDED_PREEMPTED,
    AttemptEntry,
    CloudRun,
    EndEntry,
    FinishEntry,
    HostEntry,
    Option,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.record.read_entry import DamagedEntry
from forerun.cloud.record.run_files import RunFiles


def place(option: Option) -> tuple[str, str, str, str]:
    """Return what identifies an option: where which slice is rented."""
    return option.provider, option.slice, option.zone, option.capacity


def is_foreign(entry: AttemptEntry, run: CloudRun) -> bool:
    """Return whether the user who agreed to this run did not choose the option of an attempt."""
    return place(entry.option) not in [place(option) for option in run.options]


def adopted(entry: AttemptEntry, run: CloudRun, spent_usd: float, now: float) -> AttemptEntry:
    """Return an attempt of the record with the price, the limit and the name that hold for this run.

    The record may be forged. It can lower the limit. It can neither raise it nor name another resource.

    Args:
      run: what the user has agreed to.
      spent_usd: what earlier attempts and the keeper cost, as far as this controller knows.
    """
    option = next((option for option in run.options if place(option) == place(entry.option)), entry.option)
    spent_usd = max(spent_usd, entry.spent_usd)
    limit = attempt_limit(run, spent_usd, option)
    # Another controller may have rounded differently. All controllers should send the same request.
    if entry.limit_seconds is not None and (limit is None or entry.limit_seconds <= limit + 1):
        limit = entry.limit_seconds
    return AttemptEntry(
        number=entry.number,
        option=option,
        resource=resource_name(run.name, entry.number),
        # Billing that ended before the creation belongs to another slice, so a time in the future would hide a cost.
        created_at=min(entry.created_at, now),
        limit_seconds=limit,
        spent_usd=spent_usd,
    )


def with_lower_cap(run: CloudRun, recorded: CloudRun) -> CloudRun:
    """Return the agreed run with the cap of the record, if that is lower: another laptop may have lowered it."""
    if run.max_usd is None or recorded.max_usd is None or recorded.max_usd >= run.max_usd:
        return run
    return replace(run, max_usd=recorded.max_usd)


T = TypeVar("T")
MOST_NEW_ATTEMPTS = 20  # that are read at one time: a forged record must not delay the deletion at the deadline


@dataclass(frozen=True)
class _Sight:
    """A host's report and when this process saw it, and its phase, for the first time."""

    entry: HostEntry
    at: float
    phase_at: float


class RunObserver:
    """Reads a run repeatedly.

    What this machine knows itself is in the ledger. The record adds to it: a lower cap, a stop, attempts of other
    controllers, and earlier times of billing. A file that is damaged or missing changes nothing.

    Args:
      run: what the user has agreed to.
      since: when the user started or resumed the run, in the cloud's time.

    Attributes:
      run: the same with the cap of the record, if that is lower.
      damaged: the files of the record without a valid entry, and why, by address.
      recorded_ends: the ends of attempts in the record, before they are verified.
      unrecorded_ends: the numbers of attempts whose verified end the record does not contain.
      requested: when this process requested the slice of an attempt.
      unready_at: when the API told for the last time that the slice of an attempt is not ready.
    """

    def __init__(self, run: CloudRun, files: RunFiles, ledger: RunLedger, since: float = 0.0) -> None:
        self.agreed = self.run = run
        self.files, self.ledger, self.since = files, ledger, since
        self.requested: dict[int, float] = {}
        self.delivered: set[int] = set()
        self.damaged: dict[str, str] = {}
        self.recorded_ends: dict[int, EndEntry] = {}
        self.unrecorded_ends: set[int] = set()
        self.unready_at: dict[int, float] = {}
        self._unknown: set[int] = set()  # attempts of which only the number is known
        self._recorded_usd: dict[int, float] = {}
        self._compared: set[int] = set()  # attempts whose verified end was compared with the record
        self._listed = False
        self._stop: StopEntry | None = None
        self._finished: FinishEntry | None = None
        self._sights: dict[tuple[int, int], _Sight] = {}
        self._looked_at: float | None = None
        self._is_reading = self._was_interrupted = False

    def read(self, providers: Collection[str], now: float) -> None:
        """Read the record.

        Args:
          providers: the names of those that this controller can use.
        """
        self._was_interrupted = self._was_interrupted or self._is_reading
        self._is_reading = True  # until the look has succeeded
        self.damaged = {}
        recorded = self._valid(self.files.run(), CloudRun)
        self.run = self.agreed if recorded is None else with_lower_cap(self.agreed, recorded)
        if recorded is None and not self.damaged:
            self.damaged[f"{self.files.files.address}/run.json"] = "it does not exist"
        self._read_attempts(providers, now)
        self._lower_limit(now)
        for number in [number for number, known in self.ledger.attempts.items() if known.end is not None]:
            if number not in self._compared:
                self._compare_end(number)
        for known in self.ledger.open:
            self._read_open(known.entry.number, now)
            if known.entry.number not in self.recorded_ends:
                break  # an attempt begins after the end of all others, so later entries can wait
        stop = self._valid(self.files.stop(), StopEntry)
        if self._stop is None and stop is not None:
            self._stop = StopEntry(min(stop.at, now), stop.reason)  # a time in the future would delay the deletion
        self._finished = self._finished or self._valid(self.files.finished(), FinishEntry)

    def look(self, providers: Mapping[str, Provider], clock: Callable[[], float]) -> ControlView:
        """Return the run as it is now.

        The state of the slice is read after the record, so it is never older. The clock is read last: the answer of the
        cloud has its newest time.
        """
        view = self.view(0.0)
        current = view.current
        if current is None:
            self._is_reading = False
            return replace(view, now=clock())
        number, option = current.entry.number, current.entry.option
        reports = self.files.hosts(number, option.hosts)
        found = {host: report for host, one in reports.items() if (report := self._valid(one, HostEntry)) is not None}
        status = providers[option.provider].status(current.entry.resource, option.zone)
        now = clock()
        status = self.note(number, status, now)
        return replace(
            self.view(now),
            status=status,
            hosts=self._reports(number, found, now),
            requested_at=self.requested.get(number),
            delivered=number in self.delivered,
        )

    def view(self, now: float) -> ControlView:
        """Return what is known without the state of the slice."""
        return ControlView(
            now=now,
            run=self.run,
            since=self.since,
            attempts=[self._attempt_view(one) for _, one in sorted(self.ledger.attempts.items())],
            unknown_usd={number: self._recorded_usd[number] for number in sorted(self._unknown)},
            stop=self._stop,
            finished=self._finished,
        )

    def note(self, number: int, status: SliceStatus, now: float) -> SliceStatus:
        """Keep what the API tells about the slice of an attempt, and return its status.

        The first time of billing is kept by the action `RecordReady`. Here, the API can only make it earlier.
        """
        known = self.ledger.attempts[number]
        status = own_status(status, known.entry)
        if known.ready_at is not None and status.ready_at is not None:
            self.ledger.bill_from(number, status.ready_at)
        if status.state is SliceState.READY:
            self.ledger.see(number, now)
        else:
            self.unready_at[number] = now
        return status

    def ask_billing(self, provider: Provider, entry: AttemptEntry) -> float | None:
        """Keep since when a slice is billed, and return when that ended, by the API.

        The record may have a forged end of an attempt that this machine has never seen ready.
        """
        status = own_status(provider.status(entry.resource, entry.option.zone), entry)
        if status.ready_at is not None:
            self.ledger.bill_from(entry.number, status.ready_at)
        return status.ended_at

    def request_stop(self, stop: StopEntry) -> None:
        """Remember a stop of this controller: it holds even if its file is damaged or deleted."""
        self._stop = self._stop or stop

    def _read_attempts(self, providers: Collection[str], now: float) -> None:
        """Add attempts that other processes have recorded. Attempts that this machine knows are not read again.

        An attempt without a valid entry has existed, and may have cost the complete cap. The recorded end tells less.
        """
        entries: dict[int, AttemptEntry | DamagedEntry] = {} if self._listed else self.files.attempts()
        last = max((*self.ledger.attempts, *self._unknown, *entries), default=0)
        for number in range(last + 1, last + 1 + MOST_NEW_ATTEMPTS):
            entry = self.files.attempt(number)
            if entry is None:
                break
            entries[number] = entry
        self._listed = True
        new: list[LedgerAttempt] = []
        spent = self._usd_of_attempts()
        for number in range(1, max((last, *entries)) + 1):
            if number in self.ledger.attempts or number in self._unknown:
                continue
            valid = self._valid(entries.get(number), AttemptEntry)
            end = None if number not in entries else self._valid(self.files.end(number), EndEntry)
            if valid is None or valid.option.provider not in providers:
                self._unknown.add(number)
                self._recorded_usd[number] = (self.run.max_usd or 0.0) if end is None else end.usd
                spent += self._recorded_usd[number]
                continue
            entry = adopted(valid, self.run, spent + keeper_usd(self.run, min(valid.created_at, now)), now)
            new.append(LedgerAttempt(entry, is_foreign=is_foreign(entry, self.run)))
            spent += 0.0 if end is None else end.usd
        self.ledger.add(*new)

    def _lower_limit(self, now: float) -> None:
        """Lower the limit of the current attempt if it was adopted before the earlier attempts had ended.

        A forged entry of the next attempt can be adopted while an attempt runs, whose later cost it does not count.
        """
        if not self.ledger.open:
            return
        entry = self.ledger.open[0].entry
        spent = self._usd_of_attempts(entry.number) + keeper_usd(self.run, min(entry.created_at, now))
        if spent > entry.spent_usd:
            self.ledger.replace_entry(adopted(entry, self.run, spent, now))

    def _read_open(self, number: int, now: float) -> None:
        ready = self._valid(self.files.ready(number), ReadyEntry)
        known = self.ledger.attempts[number]
        if ready is not None and ready.at <= now:
            self.ledger.bill_from(number, max(ready.at, known.entry.created_at))
        recorded = self.files.end(number)
        end = self._valid(recorded, EndEntry)
        if isinstance(recorded, DamagedEntry) and known.ready_at is None and number not in self.requested:
            # Another controller has ended it, and neither this machine nor the record tells what it cost.
            end = EndEntry(now, ENDED_PREEMPTED, limit_usd(self.run, known.entry), "its end is damaged")
        if end is not None:
            self.recorded_ends.setdefault(number, end)

    def _compare_end(self, number: int) -> None:
        """Compare a verified end with the record: the larger cost counts, and a missing end is recorded again."""
        recorded = self.files.end(number)
        self._compared.add(number)
        if recorded is None:
            self.unrecorded_ends.add(number)
        elif (end := self._valid(recorded, EndEntry)) is not None:
            self._recorded_usd[number] = end.usd

    def _attempt_view(self, known: LedgerAttempt) -> AttemptView:
        number = known.entry.number
        end = known.end
        if end is not None:
            end = replace(end, usd=max(end.usd, self._recorded_usd.get(number, 0.0)))
        return AttemptView(
            entry=known.entry,
            ready=None if known.ready_at is None else ReadyEntry(known.ready_at),
            end=end,
            recorded_end=self.recorded_ends.get(number),
            seen_at=known.seen_at,
            is_foreign=known.is_foreign,
        )

    def _usd_of_attempts(self, before: float = math.inf) -> float:
        """Return what the attempts with lower numbers have cost until now, as far as this controller has seen."""
        attempts = [self._attempt_view(attempt) for number, attempt in self.ledger.attempts.items() if number < before]
        return sum(attempt.usd(attempt.seen_at or 0.0) for attempt in attempts) + sum(
            self._recorded_usd[number] for number in self._unknown if number < before
        )

    def _valid(self, entry: object, kind: type[T]) -> T | None:
        if isinstance(entry, DamagedEntry):
            self.damaged[entry.path] = entry.reason
        return entry if isinstance(entry, kind) else None

    def _reports(self, attempt: int, found: Mapping[int, HostEntry], now: float) -> dict[int, HostReport]:
        """Return the last report of each host. A host whose file is damaged or deleted sends no new report."""
        if self._was_interrupted and self._looked_at is not None:
            # Nothing could be read in the meantime. Only time in which reports can be read counts.
            gap = now - self._looked_at
            for key, sight in self._sights.items():
                self._sights[key] = replace(sight, at=sight.at + gap)
        self._looked_at, self._is_reading, self._was_interrupted = now, False, False
        for host, entry in found.items():
            known = self._sights.get((attempt, host))
            if known is None:
                self._sights[attempt, host] = _Sight(entry, now, now)
            elif known.entry != entry:
                phase_at = known.phase_at if known.entry.phase == entry.phase else now
                self._sights[attempt, host] = _Sight(entry, now, phase_at)
        return {
            host: HostReport(sight.entry, now - sight.at, now - sight.phase_at)
            for (number, host), sight in sorted(self._sights.items())
            if number == attempt
        }


def own_status(status: SliceStatus, entry: AttemptEntry) -> SliceStatus:
    """Return the state of the slice of an attempt, or ABSENT if it is that of an earlier slice with the same name.

    The operations of a cloud still tell for days what happened to a slice, also to one of an earlier run.
    """
    last = status.ready_at if status.ended_at is None else status.ended_at
    gone = status.state in (SliceState.ABSENT, SliceState.FAILED)
    return SliceStatus(SliceState.ABSENT) if gone and last is not None and last < entry.created_at else status
