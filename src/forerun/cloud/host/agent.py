"""The loop of an agent: look, decide, act, report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from forerun.cloud.deadline import deadline_at
from forerun.cloud.host.bucket_link import BucketLink
from forerun.cloud.host.decision import HostAction, HostDecision, HostView, decide
from forerun.cloud.host.host_clock import HostClock
from forerun.cloud.host.layout import HostLayout
from forerun.cloud.host.log_copy import LogCopy
from forerun.cloud.host.planned_program import program_note
from forerun.cloud.host.results import ResultStore
from forerun.cloud.host.service import stop_training, training_state
from forerun.cloud.host.settings import AgentSettings
from forerun.cloud.host.train_progress import read_progress
from forerun.cloud.provider import SliceStatus
from forerun.cloud.record.entries import HostEntry, ReadyEntry
from forerun.cloud.record.run_files import RunFiles
from forerun.report.program_differences import program_of_run


class SliceApi(Protocol):
    """The part of a provider that an agent uses."""

    def now(self) -> float: ...

    def status(self, name: str, zone: str) -> SliceStatus: ...

    def delete(self, name: str, zone: str) -> float | None: ...


@dataclass(frozen=True)
class AgentTimes:
    """How often an agent acts.

    Attributes:
      first_answer_seconds: how long the agent waits for the cloud's clock before it uses this machine's clock.
      speed: how many seconds pass for the waits of the agent in one second of this machine. 1 on real hosts.
    """

    loop_seconds: float = 1.0
    report_seconds: float = 5.0
    clock_seconds: float = 5.0
    retry_seconds: float = 10.0
    flush_seconds: float = 20.0
    first_answer_seconds: float = 60.0
    speed: float = 1.0


REAL_TIMES = AgentTimes()


class Agent:
    """The agent of one host.

    Args:
      host: the index of this host.
      api: None for machines of the user, which are never deleted.
      notice: returns why the cloud will end this machine, or an empty string.
      tell: writes a line to the agent's log.
    """

    def __init__(
        self,
        settings: AgentSettings,
        layout: HostLayout,
        files: RunFiles,
        host: int,
        api: SliceApi | None,
        notice: Callable[[], str],
        tell: Callable[[str], None],
        times: AgentTimes = REAL_TIMES,
    ) -> None:
        self._settings, self._layout, self._files = settings, layout, files
        self._host, self._api, self._notice, self._tell, self._times = host, api, notice, tell, times
        self._clock = HostClock(time.time if api is None else api.now)
        logs = LogCopy(files, settings.attempt, host, layout.copied_logs, layout.log_position)
        every_seconds = times.report_seconds / times.speed
        self._link = BucketLink(files, settings.attempt, settings.hosts, logs, every_seconds=every_seconds, tell=tell)
        self._results = ResultStore(files, settings, layout, self._clock.now, tell)
        self._closed = threading.Event()
        self._ended: float | None = None  # monotonic
        self._last = HostDecision("")
        self._stop_asked = self._delete_asked = float("-inf")  # monotonic

    def run(self) -> int:
        """Run until the slice is deleted, or training has ended on a machine that cannot be deleted."""
        self._link.start()
        clock = threading.Thread(target=self._follow_cloud, name="clock", daemon=True)
        clock.start()
        self._clock.wait(self._times.first_answer_seconds / self._times.speed)
        try:
            while not self.turn() and not self._closed.is_set():
                self._closed.wait(self._times.loop_seconds / self._times.speed)
        finally:
            self._closed.set()
            self._results.cancel()
            self._link.close()
        return 0

    def close(self) -> None:
        """End `run` after its present turn, without a deletion."""
        self._closed.set()

    def turn(self) -> bool:
        """Look, decide, act and report once. Return whether the agent's work is done."""
        view = self.view()
        decision = decide(view)
        if decision.is_end and self._ended is None:
            self._ended = time.monotonic()
        is_new = (decision.phase, decision.detail) != (self._last.phase, self._last.detail)
        if is_new:
            self._tell(f"{decision.phase}{': ' if decision.detail else ''}{decision.detail}")
        self._last = decision
        self._link.report(self._entry(view, decision), is_new=is_new, is_ending=not _is_running(view))
        self._act(decision.action)
        return decision.is_end and not view.is_rented and self._link.flush(self._times.flush_seconds)

    def view(self) -> HostView:
        """Return what the agent sees now. It never waits for the bucket or the API."""
        record, settings = self._link.view, self._settings
        run = self._layout.job_folder / settings.relative_run_folder
        return HostView(
            now=self._clock.now(),
            host=self._host,
            hosts=settings.hosts,
            service=training_state(self._layout),
            setup=self._setup(),
            progress=read_progress(run, self._host),
            stop_reason=record.stop_reason,
            deadline_at=None if record.ready_at is None else deadline_at(record.ready_at, record.limit_seconds),
            notice=self._notice(),
            is_finished=record.is_finished or (self._results.is_done and self._host == 0),
            is_exported=self._results.is_done,
            ended_seconds=0.0 if self._ended is None else (time.monotonic() - self._ended) * self._times.speed,
            phases=record.phases,
            is_rented=self._api is not None,
            export_note=self._results.note,
            program_note="" if record.planned is None else program_note(record.planned, program_of_run(run)),
        )

    def _act(self, action: HostAction | None) -> None:
        retry_seconds = self._times.retry_seconds / self._times.speed
        now = time.monotonic()
        if action is HostAction.STOP_TRAINING and now >= self._stop_asked + retry_seconds:
            self._stop_asked = now
            stop_training(self._layout)
        elif action is HostAction.EXPORT:
            self._results.start()
        elif action is HostAction.DELETE_SLICE and now >= self._delete_asked + retry_seconds:
            self._delete()
            self._delete_asked = time.monotonic()

    def _delete(self) -> None:
        """Delete this slice. The machine normally ends during the call."""
        assert self._api is not None
        self._results.cancel()
        if self._delete_asked == float("-inf"):  # a bucket that does not answer delays only the first try
            self._link.flush(self._times.flush_seconds / self._times.speed)
        self._tell(f"delete {self._settings.resource} in {self._settings.zone}")
        try:
            self._api.delete(self._settings.resource, self._settings.zone)
        except Exception as error:  # the agent tries again: a slice that is not deleted costs money
            self._tell(f"delete: {type(error).__name__}: {error}")

    def _entry(self, view: HostView, decision: HostDecision) -> HostEntry:
        return HostEntry(
            attempt=self._settings.attempt,
            host=self._host,
            at=view.now,
            phase=decision.phase,
            step=view.progress.step,
            detail=decision.detail,
            exit_code=None if view.service is None else view.service.exit_code,
            program=view.progress.program,
            save_seconds=view.progress.save_seconds,
        )

    def _setup(self) -> str:
        try:
            return self._layout.setup_state.read_text("utf-8").strip()
        except OSError:
            return ""

    def _follow_cloud(self) -> None:
        """Follow the cloud's clock, and record when billing began if no controller has done it."""
        trouble = ""
        while not self._closed.is_set():
            found = self._clock.refresh() or self._record_ready()
            if found != trouble:
                self._tell(f"API: {found or 'answers'}")
            trouble = found
            # The hosts of a large slice ask less often: together, they must not use up the project's quota of requests.
            every_seconds = self._times.clock_seconds * max(1.0, self._settings.hosts / 4)
            self._closed.wait(every_seconds / self._times.speed)

    def _record_ready(self) -> str:
        record = self._link.view
        if self._api is None or record.ready_at is not None or not record.is_read:
            return ""
        try:
            ready_at = self._api.status(self._settings.resource, self._settings.zone).ready_at
            if ready_at is not None:
                self._files.create_ready(self._settings.attempt, ReadyEntry(ready_at))
        except Exception as error:  # the next turn tries again
            return f"{type(error).__name__}: {error}"
        return ""


def _is_running(view: HostView) -> bool:
    return view.service is not None and (view.service.is_active or view.service.exit_code is None)
