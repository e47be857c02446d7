"""The connection of an agent to the record of its run in the bucket.

A bucket that does not answer may block a call for a minute. All calls are therefore made by one thread, and the agent
itself only reads what this thread has found. A file that cannot be read is reported once and ignored: it hides no
other file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.cloud.host.training import planned_program
from forerun.cloud.record.entries import AttemptEntry, HostEntry, ReadyEntry
from forerun.cloud.record.host_log import LogCopy
from forerun.cloud.record.read_entry import DamagedEntry
from forerun.cloud.record.run_files import RunFiles
from forerun.report.differences import ProgramFacts
from forerun.reporter import SILENT, Reporter


@dataclass(frozen=True)
class RecordView:
    """What the record of the run contained when each of its files was last read.

    Attributes:
      limit_seconds: the recorded limit of the attempt; None: no limit, or not read yet.
      ready_at: the recorded time at which billing began; None: not known yet.
      stop_reason: of the stop request; None: there is none.
      phases: the last phases that the hosts reported. Read only after training has ended.
      planned: the program that was planned for this slice; None: not planned, or not read yet.
    """

    limit_seconds: int | None = None
    ready_at: float | None = None
    stop_reason: str | None = None
    is_finished: bool = False
    phases: Mapping[int, str] = field(default_factory=dict)
    planned: ProgramFacts | None = None


class BucketLink:
    """Exchanges reports, requests and logs with the bucket in its own thread.

    Without `start`, the caller makes each exchange with `exchange`, and `flush` makes one, too.

    Args:
      every_seconds: the time between two exchanges.
      reporter: receives problems of the bucket and its files, each once.
      monotonic: limits the time of `flush`.
    """

    def __init__(
        self,
        files: RunFiles,
        attempt: int,
        hosts: int,
        logs: LogCopy,
        *,
        every_seconds: float = 5.0,
        reporter: Reporter = SILENT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._attempt, self._hosts, self._logs = files, attempt, hosts, logs
        self._every_seconds, self._reporter, self._monotonic = every_seconds, reporter, monotonic
        self._changed = threading.Condition()
        self._view = RecordView()
        self._report: HostEntry | None = None
        self._ready_at: float | None = None  # known to this host
        self._entry: AttemptEntry | None = None
        self._has_planned = False
        self._wanted = self._done = 0  # exchanges that were asked for, and that have ended
        self._is_ending = self._is_closed = False
        self._problems: dict[str, str] = {}  # by what could not be read or written
        self._has_failed = False  # a call of the last exchange
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="bucket", daemon=True)
        self._thread.start()

    @property
    def view(self) -> RecordView:
        with self._changed:
            return self._view

    def report(self, entry: HostEntry, *, is_new: bool, is_ending: bool = False, ready_at: float | None = None) -> None:
        """Set the report of the next exchange.

        Args:
          is_new: ask for an exchange without a wait.
          is_ending: training does not run: read the phases of the other hosts, and copy the logs to their ends.
          ready_at: when billing began. It is recorded unless the record has another time.
        """
        with self._changed:
            self._report, self._is_ending, self._ready_at = entry, is_ending, ready_at
            if is_new:
                self._wanted = self._done + 1
                self._changed.notify_all()

    def flush(self, limit_seconds: float) -> bool:
        """Wait until everything up to now is in the bucket, or for `limit_seconds`. Return whether it is."""
        if self._thread is None:
            return self.exchange()
        until = self._monotonic() + limit_seconds
        with self._changed:
            self._wanted = self._done + 2  # an exchange that runs now may have read an older state
            self._changed.notify_all()
            wanted = self._wanted
            while self._done < wanted and (rest := until - self._monotonic()) > 0 and not self._is_closed:
                self._changed.wait(rest)
            return self._done >= wanted and not self._has_failed

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._every_seconds + 1.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._done or self._is_closed, self._every_seconds)
                if self._is_closed:
                    return
            self.exchange()
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def exchange(self) -> bool:
        """Read the record, then write the report and the new lines of the logs. Return whether every call succeeded.

        Each call may fail on its own. The next exchange repeats it.
        """
        with self._changed:
            report, is_ending, ready_at = self._report, self._is_ending, self._ready_at
            self._has_failed = False
        number = f"attempts/{self._attempt:03}"
        self._call("stop.json", self._read_stop)
        self._call(f"{number}.json", self._read_attempt)
        self._call("run.json", self._read_versions)
        self._call(f"{number}-ready.json", lambda: self._read_ready(ready_at))
        if is_ending:
            self._call("reports of the hosts", self._read_phases)
            self._call("finished.json", self._read_finished)
        if report is not None:
            self._call("report", lambda: self._files.report_host(report))
        self._call("logs", lambda: self._logs.copy(is_last=is_ending))
        with self._changed:
            return not self._has_failed

    def _call(self, name: str, call: Callable[[], Iterable[DamagedEntry] | None]) -> None:
        """Make one call, and report a new problem of it. `call` returns the damaged files that it ignored."""
        try:
            problem = "; ".join(f"{entry}; it is ignored" for entry in call() or ())
        except Exception as error:  # the agent must survive whatever is wrong with a bucket
            problem = f"{type(error).__name__}: {error}"
            with self._changed:
                self._has_failed = True
        if problem != self._problems.get(name, ""):
            self._reporter.info(f"bucket: {name}: {problem or 'answers again'}")
        self._problems[name] = problem

    def _publish(self, **changes: Any) -> None:
        with self._changed:
            self._view = replace(self._view, **changes)

    def _read_stop(self) -> Iterable[DamagedEntry]:
        stop = self._files.stop()
        if isinstance(stop, DamagedEntry):
            return [stop]
        self._publish(stop_reason=None if stop is None else stop.reason)
        return []

    def _read_attempt(self) -> Iterable[DamagedEntry]:
        if self._entry is not None:
            return []
        entry = self._files.attempt(self._attempt)
        if isinstance(entry, DamagedEntry):
            return [entry]
        if entry is not None:
            self._entry = entry
            self._publish(limit_seconds=entry.limit_seconds)
        return []

    def _read_versions(self) -> Iterable[DamagedEntry]:
        if self._entry is None or self._has_planned:
            return []
        run = self._files.run()
        if isinstance(run, DamagedEntry):
            return [run]
        versions = {} if run is None else dict(run.versions)
        self._publish(planned=planned_program(self._entry.option, versions))
        self._has_planned = True
        return []

    def _read_ready(self, ready_at: float | None) -> Iterable[DamagedEntry]:
        if self.view.ready_at is not None:
            return []
        ready = self._files.ready(self._attempt)
        if isinstance(ready, DamagedEntry):
            return [ready]
        if ready is None and ready_at is not None:
            ready = self._files.create_ready(self._attempt, ReadyEntry(ready_at))
        if ready is not None:
            self._publish(ready_at=ready.at)
        return []

    def _read_phases(self) -> Iterable[DamagedEntry]:
        reports = self._files.hosts(self._attempt, self._hosts)
        self._publish(phases={host: one.phase for host, one in reports.items() if isinstance(one, HostEntry)})
        return [one for one in reports.values() if isinstance(one, DamagedEntry)]

    def _read_finished(self) -> Iterable[DamagedEntry]:
        finished = self._files.finished()
        if isinstance(finished, DamagedEntry):
            return [finished]
        self._publish(is_finished=self.view.is_finished or finished is not None)
        return []
