"""The loop of an agent: look, decide, act, report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from forerun.cloud.deadline import host_deadline_at
from forerun.cloud.google.clock import elapsed_seconds
from forerun.cloud.host.bucket_link import BucketLink
from forerun.cloud.host.decision import SETUP_WORDS, HostAction, HostDecision, HostView, decide, is_last_moment
from forerun.cloud.host.host_clock import HostClock
from forerun.cloud.host.results import ResultStore, start_thread
from forerun.cloud.host.settings import AgentSettings, HostLayout
from forerun.cloud.host.training import ServiceState, TrainingService, TrainProgress, program_note, read_progress
from forerun.cloud.provider import SliceStatus
from forerun.cloud.record.entries import HostEntry
from forerun.cloud.record.host_log import LogCopy
from forerun.cloud.record.run_files import RunFiles
from forerun.report.differences import program_of_run
from forerun.reporter import Reporter

T = TypeVar("T")
NEVER = float("-inf")
MOST_SETUP_BYTES = 1000


class SliceApi(Protocol):
    """The part of a provider that an agent uses."""

    def now(self) -> float: ...

    def status(self, name: str, zone: str) -> SliceStatus: ...

    def delete(self, name: str, zone: str) -> float | None: ...


class ServiceControl(Protocol):
    """The training service, as `TrainingService` reads and stops it."""

    def state(self) -> ServiceState | None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class AgentTimes:
    """How often an agent acts.

    Attributes:
      clock_seconds: more than the time for which a client of the API repeats its last answer (`FRESH_SECONDS`).
      first_answer_seconds: how long the agent waits for the cloud's clock before it uses this machine's clock.
      delete_margin_seconds: before the deadline, the deletion no longer waits for the bucket.
      speed: how many seconds pass for the waits of the agent in one second of this machine. 1 on real hosts.
    """

    loop_seconds: float = 1.0
    report_seconds: float = 5.0
    clock_seconds: float = 6.0
    retry_seconds: float = 10.0
    flush_seconds: float = 20.0
    save_seconds: float = 10.0
    first_answer_seconds: float = 60.0
    delete_margin_seconds: float = 10.0
    speed: float = 1.0


REAL_TIMES = AgentTimes()


class Agent:
    """The agent of one host.

    `run` starts a thread for each connection. A simulator calls their functions itself, in any order and as often as
    it wants: `ask_cloud`, `exchange` and `turn`. It passes `wall`, `monotonic` and `start`, so that nothing else
    depends on real time or on threads.

    Args:
      host: the index of this host.
      api: None for machines of the user, which are never deleted.
      notice: returns why the cloud will end this machine, or an empty string.
      reporter: writes a line to the agent's log.
      wall: this machine's clock.
      monotonic: the time since the boot of this machine.
      service: the training service; None: the one of systemd.
      start: runs the export in the background; it gets a function and a name.
    """

    def __init__(
        self,
        settings: AgentSettings,
        layout: HostLayout,
        files: RunFiles,
        host: int,
        api: SliceApi | None,
        notice: Callable[[], str],
        reporter: Reporter,
        times: AgentTimes = REAL_TIMES,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = elapsed_seconds,
        service: ServiceControl | None = None,
        start: Callable[[Callable[[], None], str], None] = start_thread,
    ) -> None:
        self._settings, self._layout = settings, layout
        self._host, self._api, self._notice, self._reporter, self._times = host, api, notice, reporter, times
        self._wall, self._monotonic = wall, monotonic
        self._service = TrainingService(layout) if service is None else service
        self._clock = HostClock(
            wall if api is None else api.now,
            wall,
            monotonic,
            file=layout.clock,
            boot=layout.boot_id(),
            first_answer_seconds=times.first_answer_seconds / times.speed,
            reporter=reporter,
        )
        logs = LogCopy(files, settings.attempt, host, layout.copied_logs, layout.log_position)
        every_seconds = times.report_seconds / times.speed
        self._link = BucketLink(
            files,
            settings.attempt,
            settings.hosts,
            logs,
            every_seconds=every_seconds,
            reporter=reporter,
            monotonic=monotonic,
        )
        self._results = ResultStore(files, settings, layout, lambda: self._clock.now() or wall(), reporter, start)
        self._closed = threading.Event()
        self._ended: float | None = None  # monotonic
        self._last = HostDecision("")
        self._stop_asked = self._delete_asked = self._clock_saved = NEVER  # monotonic
        self._problems: dict[str, str] = {}  # of observations, by what was observed
        self._cloud_problem = ""

    def run(self) -> int:
        """Run until the slice is deleted, or training has ended on a machine that cannot be deleted."""
        self._link.start()
        start_thread(self._follow_cloud, "clock")
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

    def exchange(self) -> bool:
        """Read the record and write reports and logs, if `run` does not. Return whether every call succeeded."""
        return self._link.exchange()

    def turn(self) -> bool:
        """Look, decide, act and report once. Return whether the agent's work is done. It raises no error."""
        try:
            return self._turn()
        except Exception as error:  # a defect of the agent must not let the slice run past its deadline
            self._report_problem("turn", f"{type(error).__name__}: {error}")
            if self._api is not None and is_last_moment(*self._time_and_deadline(), self._host):
                self._act(HostAction.DELETE_SLICE)
            return False

    def _turn(self) -> bool:
        view = self.view()
        decision = decide(view)
        if decision.is_end and self._ended is None:
            self._ended = self._monotonic()
        is_new = (decision.phase, decision.detail) != (self._last.phase, self._last.detail)
        # Until the time is known, only the deadline acts: a report with a wrong time would be taken for an old one, and
        # all other actions need a report.
        is_known = view.now > 0.0
        if is_known:
            if is_new:
                self._reporter.info(f"{decision.phase}{': ' if decision.detail else ''}{decision.detail}")
            self._link.report(
                self._entry(view, decision),
                is_new=is_new,
                is_ending=not _is_running(view),
                ready_at=self._clock.ready_at,
            )
            self._last = decision
        is_last = view.is_rented and is_last_moment(view.now, view.deadline_at, self._host)
        if is_known or is_last or decision.action is HostAction.STOP_TRAINING:
            self._act(decision.action)
        if self._monotonic() >= self._clock_saved + self._times.save_seconds / self._times.speed:
            self._clock_saved = self._monotonic()
            self._clock.save()
        self._report_problem("turn", "")
        return decision.is_end and not view.is_rented and self._link.flush(self._times.flush_seconds)

    def view(self) -> HostView:
        """Return what the agent sees now. It never waits for the bucket or the API."""
        record, settings = self._link.view, self._settings
        run = self._layout.job_folder / settings.run_folder
        planned = record.planned
        view = HostView(
            now=0.0,
            host=self._host,
            hosts=settings.hosts,
            service=self._observed("systemctl", None, self._service.state),
            setup=self._observed("state", "", self._setup),
            progress=self._observed("progress", TrainProgress(), lambda: read_progress(run, self._host)),
            stop_reason=record.stop_reason,
            notice=self._observed("notice", "", self._notice),
            is_finished=record.is_finished or (self._results.is_done and self._host == 0),
            is_exported=self._results.is_done,
            ended_seconds=0.0 if self._ended is None else (self._monotonic() - self._ended) * self._times.speed,
            phases=record.phases,
            is_rented=self._api is not None,
            export_note=self._results.note,
            program_note=self._observed(
                "program", "", lambda: "" if planned is None else program_note(planned, program_of_run(run))
            ),
        )
        # The time is read last: a `systemctl` that hangs must not delay the deadline.
        now, deadline = self._time_and_deadline()
        return replace(view, now=now, deadline_at=deadline)

    def _time_and_deadline(self) -> tuple[float, float | None]:
        """Return the time, or 0 if it is not known, and the deadline."""
        now, record, settings = self._clock.now(), self._link.view, self._settings
        deadline = host_deadline_at(
            now,
            self._clock.elapsed_seconds(),
            settings.deadline_at,
            (self._clock.ready_at, record.ready_at),
            (settings.limit_seconds, record.limit_seconds),
        )
        return now or 0.0, deadline

    def _observed(self, name: str, absent: T, observe: Callable[[], T]) -> T:
        """Return an observation, or `absent` if it fails: nothing that is observed may delay the deadline."""
        try:
            value = observe()
        except Exception as error:
            self._report_problem(name, f"{type(error).__name__}: {error}")
            return absent
        self._report_problem(name, "")
        return value

    def _report_problem(self, name: str, problem: str) -> None:
        if problem != self._problems.get(name, ""):
            self._reporter.info(f"{name}: {problem or 'works again'}")
        self._problems[name] = problem

    def _act(self, action: HostAction | None) -> None:
        retry_seconds = self._times.retry_seconds / self._times.speed
        now = self._monotonic()
        if action is HostAction.STOP_TRAINING and now >= self._stop_asked + retry_seconds:
            self._stop_asked = now
            self._service.stop()
        elif action is HostAction.EXPORT:
            self._results.start()
        elif action is HostAction.DELETE_SLICE and now >= self._delete_asked + retry_seconds:
            self._delete()
            self._delete_asked = self._monotonic()

    def _delete(self) -> None:
        """Delete this slice. The machine normally ends during the call."""
        assert self._api is not None
        self._observed("export", None, self._results.cancel)
        if self._delete_asked == NEVER:  # a bucket that does not answer delays only the first try
            now, deadline = self._time_and_deadline()
            most = self._times.flush_seconds
            if deadline is not None:
                most = min(most, max(deadline - now - self._times.delete_margin_seconds, 0.0))
            self._link.flush(most / self._times.speed)
        self._reporter.info(f"delete {self._settings.resource} in {self._settings.zone}")
        try:
            self._api.delete(self._settings.resource, self._settings.zone)
        except Exception as error:  # the agent tries again: a slice that is not deleted costs money
            self._reporter.info(f"delete: {type(error).__name__}: {error}")

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
        """Return the line that the startup script wrote last, or an empty string.

        Raises:
          ValueError: The file has something else.
        """
        try:
            with self._layout.setup_state.open("rb") as file:
                line = file.read(MOST_SETUP_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
        if line and line.partition(" ")[0] not in SETUP_WORDS:
            raise ValueError(f"{line[:50]!r} is no state of the setup, and is ignored")
        return line

    def ask_cloud(self) -> float:
        """Ask the cloud for its time, and once for the start of billing. Return the seconds until the next call."""
        problem = "; ".join(filter(None, (self._clock.refresh(), self._ask_ready())))
        if problem != self._cloud_problem:
            self._reporter.info(f"API: {problem or 'answers'}")
        self._cloud_problem = problem
        # The hosts of a large slice ask less often: together, they must not use up the project's quota of requests.
        is_urgent = self._clock.is_contradicted
        return self._times.clock_seconds * (1.0 if is_urgent else max(1.0, self._settings.hosts / 4))

    def _follow_cloud(self) -> None:
        while not self._closed.is_set():
            try:
                pause_seconds = self.ask_cloud()
            except Exception as error:  # nothing ends this thread
                self._reporter.info(f"clock: {type(error).__name__}: {error}")
                pause_seconds = self._times.clock_seconds
            self._closed.wait(pause_seconds / self._times.speed)

    def _ask_ready(self) -> str:
        """Ask when billing began, unless it is known. The record is not asked: it may be forged."""
        if self._api is None or self._clock.ready_at is not None or self._clock.now() is None:
            return ""
        try:
            ready_at = self._api.status(self._settings.resource, self._settings.zone).ready_at
            if ready_at is not None:
                self._clock.set_ready(ready_at)
        except Exception as error:  # the next call tries again
            return f"{type(error).__name__}: {error}"
        return ""


def _is_running(view: HostView) -> bool:
    return view.service is not None and (view.service.is_active or view.service.exit_code is None)
