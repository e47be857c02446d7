"""Reading of the record and of the slice's state, as the view on which a controller decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from forerun.cloud.control.run_view import AttemptView, ControlView, HostReport
from forerun.cloud.provider import Provider, SliceState, SliceStatus
from forerun.cloud.record.entries import AttemptEntry, CloudRun, HostEntry
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles


@dataclass(frozen=True)
class _Sight:
    """A host's report and when this process saw it, and its phase, for the first time."""

    entry: HostEntry
    at: float
    phase_at: float


class RunObserver:
    """Reads a run repeatedly. It keeps what cannot change: ended attempts, and when it saw which report first.

    Args:
      since: when the user started or resumed the run, in the cloud's time.
    """

    def __init__(self, files: RunFiles, since: float = 0.0) -> None:
        self.files, self.since = files, since
        self.requested: dict[int, float] = {}  # attempt: when this process requested its slice
        self.delivered: set[int] = set()
        self._attempts: list[AttemptView] = []
        self._sights: dict[tuple[int, int], _Sight] = {}

    def look(self, run: CloudRun, providers: Mapping[str, Provider], clock: Callable[[], float]) -> ControlView:
        """Return the run as it is now.

        The state of the slice is read after the record, so it is never older. The clock is read last: the answer of the
        cloud has its newest time.
        """
        if not self._attempts:
            self._attempts = [
                AttemptView(entry) for entry in self.files.attempts().values() if isinstance(entry, AttemptEntry)
            ]
        while (entry := undamaged(self.files.attempt(self._last_number + 1))) is not None:
            self._attempts.append(AttemptView(entry))
        self._attempts = [self._fresh(one) for one in self._attempts]
        view = ControlView(
            now=0.0,
            run=run,
            since=self.since,
            attempts=tuple(self._attempts),
            stop=undamaged(self.files.stop()),
            finished=undamaged(self.files.finished()),
        )
        current = view.current
        if current is None:
            return replace(view, now=clock())
        number, option = current.entry.number, current.entry.option
        reports = self.files.hosts(number, option.hosts)
        found = {host: entry for host, entry in reports.items() if isinstance(entry, HostEntry)}
        status = own_status(providers[option.provider].status(current.entry.resource, option.zone), current.entry)
        now = clock()
        return replace(
            view,
            now=now,
            status=status,
            hosts=self._reports(number, found, now),
            requested_at=self.requested.get(number),
            delivered=number in self.delivered,
        )

    @property
    def _last_number(self) -> int:
        return max((one.entry.number for one in self._attempts), default=0)

    def _fresh(self, known: AttemptView) -> AttemptView:
        if known.end is not None:
            return known
        number = known.entry.number
        end = undamaged(self.files.end(number))
        return AttemptView(known.entry, known.ready or undamaged(self.files.ready(number)), end)

    def _reports(self, attempt: int, found: Mapping[int, HostEntry], now: float) -> dict[int, HostReport]:
        reports = {}
        for host, entry in found.items():
            known = self._sights.get((attempt, host))
            if known is None:
                known = _Sight(entry, now, now)
            elif known.entry != entry:
                known = _Sight(entry, now, known.phase_at if known.entry.phase == entry.phase else now)
            self._sights[attempt, host] = known
            reports[host] = HostReport(entry, now - known.at, now - known.phase_at)
        return reports


def own_status(status: SliceStatus, entry: AttemptEntry) -> SliceStatus:
    """Return the state of the slice of an attempt, or ABSENT if it is that of an earlier slice with the same name.

    The operations of a cloud still tell for days what happened to a slice, also to one of an earlier run.
    """
    last = status.ready_at if status.ended_at is None else status.ended_at
    gone = status.state in (SliceState.ABSENT, SliceState.FAILED)
    return SliceStatus(SliceState.ABSENT) if gone and last is not None and last < entry.created_at else status
