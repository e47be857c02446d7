"""The connection of an agent to the record of its run in the bucket.

A bucket that does not answer may block a call for a minute. All calls are therefore made by one thread, and the agent
itself only reads what this thread has found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from forerun.cloud.host.log_copy import LogCopy
from forerun.cloud.host.planned_program import planned_program
from forerun.cloud.record.entries import HostEntry
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.report.program_differences import ProgramFacts


@dataclass(frozen=True)
class RecordView:
    """What the record of the run contained at the last successful reading.

    Attributes:
      limit_seconds: the limit of the attempt; None: no limit, or not read yet.
      ready_at: when billing began; None: not known yet.
      stop_reason: of the stop request; None: there is none.
      phases: the last phases that the hosts reported. Read only after training has ended.
      planned: the program that was planned for this slice; None: not planned, or not read yet.
      is_read: the record was read at least once.
    """

    limit_seconds: int | None = None
    ready_at: float | None = None
    stop_reason: str | None = None
    is_finished: bool = False
    phases: Mapping[int, str] = field(default_factory=dict)
    planned: ProgramFacts | None = None
    is_read: bool = False


class BucketLink:
    """Exchanges reports, requests and logs with the bucket in its own thread.

    Args:
      every_seconds: the time between two exchanges.
      tell: receives problems of the bucket, each once.
    """

    def __init__(
        self,
        files: RunFiles,
        attempt: int,
        hosts: int,
        logs: LogCopy,
        *,
        every_seconds: float = 5.0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._files, self._attempt, self._hosts, self._logs = files, attempt, hosts, logs
        self._every_seconds, self._tell = every_seconds, tell
        self._changed = threading.Condition()
        self._view = RecordView()
        self._report: HostEntry | None = None
        self._wanted = self._done = 0  # exchanges that were asked for, and that have ended
        self._is_ending = self._is_closed = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._work, name="bucket", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def view(self) -> RecordView:
        with self._changed:
            return self._view

    def report(self, entry: HostEntry, *, is_new: bool, is_ending: bool = False) -> None:
        """Set the report of the next exchange. `is_new` asks for an exchange without a wait."""
        with self._changed:
            self._report, self._is_ending = entry, is_ending
            if is_new:
                self._wanted = self._done + 1
                self._changed.notify_all()

    def flush(self, limit_seconds: float) -> bool:
        """Wait until everything up to now is in the bucket, or for `limit_seconds`. Return whether it is."""
        until = time.monotonic() + limit_seconds
        with self._changed:
            self._wanted = self._done + 2  # an exchange that runs now may have read an older state
            self._changed.notify_all()
            wanted = self._wanted
            while self._done < wanted and (rest := until - time.monotonic()) > 0 and not self._is_closed:
                self._changed.wait(rest)
            return self._done >= wanted and not self._trouble

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(self._every_seconds + 1.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._done or self._is_closed, self._every_seconds)
                if self._is_closed:
                    return
                report, is_ending = self._report, self._is_ending
            try:
                self.exchange(report, is_ending=is_ending)
                trouble = ""
            except Exception as error:  # the agent must survive every failure of the bucket
                trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                self._tell(f"bucket: {trouble or 'answers again'}")
            with self._changed:
                self._trouble = trouble
                self._done += 1
                self._changed.notify_all()

    def exchange(self, report: HostEntry | None, *, is_ending: bool = False) -> None:
        """Read the record, then write the report and the new lines of the logs."""
        files, view = self._files, self.view
        if not view.is_read:
            attempt = undamaged(files.attempt(self._attempt))
            if attempt is not None:
                run = undamaged(files.run())
                versions = {} if run is None else dict(run.versions)
                planned = planned_program(attempt.option, versions)
                view = replace(view, limit_seconds=attempt.limit_seconds, planned=planned, is_read=True)
        if view.ready_at is None and (ready := undamaged(files.ready(self._attempt))) is not None:
            view = replace(view, ready_at=ready.at)
        stop = undamaged(files.stop())
        view = replace(view, stop_reason=None if stop is None else stop.reason)
        if is_ending:
            reports = files.hosts(self._attempt, self._hosts)
            phases = {host: entry.phase for host, entry in reports.items() if isinstance(entry, HostEntry)}
            is_finished = view.is_finished or undamaged(files.finished()) is not None
            view = replace(view, phases=phases, is_finished=is_finished)
        with self._changed:
            self._view = view
        if report is not None:
            files.report_host(report)
        self._logs.copy(is_last=is_ending)
