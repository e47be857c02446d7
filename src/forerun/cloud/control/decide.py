"""The decision of a controller: a pure function from a view of the run to the next action."""

from __future__ import annotations

from forerun.cloud.control.actions import (
    Action,
    DeliverJob,
    EndAttempt,
    EndRun,
    Pause,
    RecordReady,
    RequestSlice,
    RequestStop,
)
from forerun.cloud.control.billing import KEEPER_WAIT_SECONDS
from forerun.cloud.control.next_attempt import WAIT_SECONDS, next_attempt
from forerun.cloud.control.run_view import AttemptView, ControlView, HostReport
from forerun.cloud.provider import Failure, SliceState, SliceStatus
from forerun.cloud.record.entries import (
    BROKEN,
    ENDED_BROKEN,
    ENDED_BUDGET,
    ENDED_FAILED,
    ENDED_FINISHED,
    ENDED_PREEMPTED,
    ENDED_REFUSED,
    ENDED_STOPPED,
    FAILED,
    FINISHED,
    PREEMPTING,
    STOPPED,
    StopEntry,
)
from forerun.exit_codes import INTERRUPTED
from forerun.exit_codes import STOPPED as STOPPED_AS_ASKED

SILENT_SECONDS = 180.0  # a host without a report for this time is lost
SETUP_SECONDS = 1800.0  # until all hosts report for the first time
CREATE_SECONDS = 1800.0  # until machines that have capacity are ready
APPEAR_SECONDS = 120.0  # until a request that was accepted is visible
NOTICE_SECONDS = 120.0  # after a notice of preemption, the machines are gone or useless
GONE = {SliceState.PREEMPTED, SliceState.FAILED, SliceState.STOPPED, SliceState.ABSENT, SliceState.DELETING}
NORMAL_EXITS = {None, 0, STOPPED_AS_ASKED, INTERRUPTED}


def decide(view: ControlView) -> Action:
    """Return the next action for a run."""
    current = view.current
    if current is None:
        if view.finished is not None:
            return EndRun(ENDED_FINISHED)
        if view.stop is not None:
            return EndRun(_stop_reason(view.stop), view.stop.reason)
        failed = _failure(view)
        return failed if failed is not None else next_attempt(view)
    status = view.status or SliceStatus(SliceState.ABSENT)
    if current.recorded_end is not None:
        # Another controller has recorded the end, or the record is forged. Deleting again verifies it, and a slice that
        # lives is billed until its deletion. Until then, no other attempt starts.
        recorded = current.recorded_end
        return _end(view, current, status, recorded.reason, recorded.detail, _failure_named(recorded.failure))
    if view.deadline is not None and view.now >= view.deadline:
        # This is first because nothing below may delay it: no report, no stop request and no state of the slice.
        return _end(view, current, status, _reason_at_deadline(view, status), "deleted at the deadline")
    if current.is_foreign:
        # The user agreed neither to this slice nor to its price.
        return _end(view, current, status, ENDED_STOPPED, "it is not one of the slices that the user chose")
    if view.finished is not None:
        return _end(view, current, status, ENDED_FINISHED)
    return _before_ready(view, current, status) if current.ready is None else _while_ready(view, current, status)


def is_limit(view: ControlView, action: Action) -> bool:
    """Return whether a controller carries out an action even if another one has the lease.

    The lease is a file of the record, so it may be forged. These actions only end what is billed, or record since when
    it is billed, and two controllers may do each of them.
    """
    if isinstance(action, RecordReady):
        return True
    overdue = view.stop_at is not None and view.now >= view.stop_at
    verified = view.current is not None and view.current.recorded_end is not None
    return isinstance(action, EndAttempt | RequestStop) and (overdue or verified)


def _failure(view: ControlView) -> EndRun | None:
    """Return the end of a run whose job failed: another machine would fail in the same way."""
    if view.ended and view.ended[-1][1].reason == ENDED_FAILED and view.ended[-1][0].created_at >= view.since:
        return EndRun(ENDED_FAILED, view.ended[-1][1].detail)
    return None


def _before_ready(view: ControlView, current: AttemptView, status: SliceStatus) -> Action:
    entry = current.entry
    if status.ready_at is not None or status.state is SliceState.READY:
        return RecordReady(entry, view.now if status.ready_at is None else status.ready_at)
    if view.stop is not None:
        return EndAttempt(entry, _stop_reason(view.stop))
    waited = view.now - entry.created_at
    match status.state:
        case SliceState.ABSENT:
            if view.requested_at is None:
                return RequestSlice(entry)
            if view.now - view.requested_at < APPEAR_SECONDS:
                return Pause("the request is accepted")
            return EndAttempt(entry, ENDED_REFUSED, "the request disappeared", Failure.OTHER)
        case SliceState.WAITING:
            limit = view.run.wait_seconds or (WAIT_SECONDS if len(view.run.options) > 1 else None)
            if view.run.keeper:
                limit = min(limit or KEEPER_WAIT_SECONDS, KEEPER_WAIT_SECONDS)
            if limit is not None and waited > limit:
                return EndAttempt(entry, ENDED_REFUSED, f"no capacity for {waited:.0f} s", Failure.CAPACITY)
            return Pause("waiting for capacity")
        case SliceState.CREATING:
            if waited > CREATE_SECONDS + (view.run.wait_seconds or WAIT_SECONDS):
                return EndAttempt(entry, ENDED_REFUSED, f"not ready after {waited:.0f} s", Failure.OTHER)
            return Pause("the machines are being created")
        case SliceState.PREEMPTED:
            return EndAttempt(entry, ENDED_PREEMPTED, status.detail)
        case _:
            return EndAttempt(entry, ENDED_REFUSED, status.detail, status.failure or Failure.OTHER)


def _while_ready(view: ControlView, current: AttemptView, status: SliceStatus) -> Action:
    entry, hosts = current.entry, view.hosts
    phases = {host.entry.phase for host in hosts.values()}
    complete = len(hosts) >= entry.option.hosts
    silent = [host for host in hosts.values() if host.silent_seconds > SILENT_SECONDS]
    failed = next((host for host in hosts.values() if _job_failed(host)), None)
    if failed is not None and view.stop is None and not silent:
        detail = f"host {failed.entry.host}: exit code {failed.entry.exit_code}: {failed.entry.detail}"
        return _end(view, current, status, ENDED_FAILED, detail)
    if status.state in GONE:
        return _end(view, current, status, _gone_reason(view), status.detail)
    if view.stop is not None:
        return _stopping(view, current, status, view.stop)
    if view.stop_at is not None and view.now >= view.stop_at:
        return RequestStop(ENDED_BUDGET)
    if (host := next((host for host in hosts.values() if host.entry.phase == BROKEN), None)) is not None:
        return _end(view, current, status, ENDED_BROKEN, f"host {host.entry.host}: {host.entry.detail}")
    if complete and FINISHED not in phases and all(_has_ended(host) for host in hosts.values()):
        return _end(view, current, status, _gone_reason(view), "the hosts stopped")
    noticed = [host for host in hosts.values() if host.entry.phase == PREEMPTING]
    if any(host.phase_seconds > NOTICE_SECONDS for host in noticed):
        return _end(view, current, status, ENDED_PREEMPTED, "notice of preemption")
    if silent:
        detail = f"no report of host {silent[0].entry.host} for {silent[0].silent_seconds:.0f} s"
        return _end(view, current, status, ENDED_PREEMPTED, detail)
    if complete:
        return Pause("training")
    assert current.ready is not None
    if view.now - current.ready.at > SETUP_SECONDS:
        missing = sorted(set(range(entry.option.hosts)) - set(hosts))
        detail = f"no report of host {missing[0]} for {view.now - current.ready.at:.0f} s after the start"
        return _end(view, current, status, ENDED_BROKEN, detail)
    return Pause("the hosts are being set up") if view.delivered else DeliverJob(entry)


def _stopping(view: ControlView, current: AttemptView, status: SliceStatus, stop: StopEntry) -> Action:
    """Delete the slice when all hosts have stopped, when they had nothing to save, or when their time is over."""
    stopped = len(view.hosts) >= current.entry.option.hosts and all(map(_has_ended, view.hosts.values()))
    if stopped or not view.hosts or view.now >= stop.at + 2 * view.grace:
        return _end(view, current, status, _stop_reason(stop), "" if stopped else "deleted without a report of a save")
    return Pause("the hosts save a checkpoint")


def _end(
    view: ControlView,
    current: AttemptView,
    status: SliceStatus,
    reason: str,
    detail: str = "",
    failure: Failure | None = None,
) -> EndAttempt:
    at = None
    # A slice that is being deleted is billed until the deletion is complete.
    if current.ready is not None and status.state in GONE and status.state is not SliceState.DELETING:
        at = view.latest_end if status.ended_at is None else status.ended_at
    return EndAttempt(current.entry, reason, detail, failure, at, status.state is SliceState.PREEMPTED)


def _reason_at_deadline(view: ControlView, status: SliceStatus) -> str:
    if view.finished is not None:
        return ENDED_FINISHED
    # A slice that was gone before its deadline has left a part of the budget, and the run may continue.
    if status.state in GONE:
        return _gone_reason(view)
    return ENDED_BUDGET if view.stop is None else _stop_reason(view.stop)


def _failure_named(name: str) -> Failure | None:
    """Return the failure that a record names, or None: a record may contain any word."""
    return next((failure for failure in Failure if failure.value == name), None)


def _gone_reason(view: ControlView) -> str:
    """Return why a slice ended that no controller deleted: a stop, the limit of its hosts or the API, a preemption."""
    if view.stop is not None:
        return _stop_reason(view.stop)
    if view.stop_at is not None and view.latest_end >= view.stop_at:
        return ENDED_BUDGET
    return ENDED_PREEMPTED


def _stop_reason(stop: StopEntry) -> str:
    return ENDED_BUDGET if stop.reason == ENDED_BUDGET else ENDED_STOPPED


def _job_failed(host: HostReport) -> bool:
    return host.entry.phase == FAILED or (host.entry.phase == STOPPED and host.entry.exit_code not in NORMAL_EXITS)


def _has_ended(host: HostReport) -> bool:
    """Return whether training has ended on a host, for any reason."""
    if host.entry.phase == PREEMPTING:
        return host.entry.exit_code is not None
    return host.entry.phase in (STOPPED, FINISHED, BROKEN, FAILED)
