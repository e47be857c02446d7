"""What an agent does next: a pure function of what it sees."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.cloud.deadline import DELETE_SECONDS, grace_seconds, host_delay_seconds
from forerun.cloud.host.training import ServiceState, TrainProgress
from forerun.cloud.record.entries import (
    BROKEN,
    CHECKING,
    EXPORTING,
    FAILED,
    FINISHED,
    INSTALLING,
    PREEMPTING,
    STARTING,
    STOPPED,
    STOPPING,
    TRAINING,
)
from forerun.exit_codes import STOPPED as STOPPED_CODE

ENDED_PHASES = (FINISHED, STOPPED, PREEMPTING, BROKEN, FAILED)

# Words of the startup script that are not phases.
_SETUP_PHASES = {"preparing": INSTALLING, "waiting": INSTALLING, "started": STARTING}
SETUP_WORDS = (*_SETUP_PHASES, INSTALLING, CHECKING, STARTING, BROKEN, FAILED)

# How long host 0 waits for the last reports of the other hosts before it deletes the slice.
LAST_REPORTS_SECONDS = 30.0
# How long other hosts wait for host 0 to delete the slice.
OTHER_HOSTS_SECONDS = 120.0
# How long a host that cannot continue waits for a controller to act. A controller normally acts within seconds. Without
# one, the slice would be billed until its deadline.
CONTROLLER_SECONDS = 300.0


class HostAction(enum.Enum):
    """An action of the agent. Every action may be repeated."""

    STOP_TRAINING = "stop training"
    EXPORT = "export"
    DELETE_SLICE = "delete slice"


@dataclass(frozen=True)
class HostView:
    """What an agent sees.

    Attributes:
      now: the time of the cloud's clock; 0 while it is not known.
      setup: the line of the startup script: its phase, and a reason.
      service: the training service; None if systemd does not answer.
      stop_reason: of the stop request in the bucket, or None.
      deadline_at: the value of `now` at which the budget is used up, or None.
      notice: why the cloud will end this machine, or an empty string.
      is_finished: host 0 has stored the results, and `finished.json` exists.
      is_exported: the export on this host has ended.
      ended_seconds: how long training has ended, by this machine's clock; 0 while it runs.
      phases: the last reported phases of all hosts.
      is_rented: the slice can be deleted. Machines of the user cannot.
      program_note: how the compiled program differs from the planned one, or an empty string.
      export_note: why the results have no exported model, or an empty string.
    """

    now: float
    host: int
    hosts: int
    service: ServiceState | None
    setup: str = STARTING
    progress: TrainProgress = field(default_factory=TrainProgress)
    stop_reason: str | None = None
    deadline_at: float | None = None
    notice: str = ""
    is_finished: bool = False
    is_exported: bool = False
    ended_seconds: float = 0.0
    phases: Mapping[int, str] = field(default_factory=dict)
    is_rented: bool = True
    program_note: str = ""
    export_note: str = ""


@dataclass(frozen=True)
class HostDecision:
    """The phase to report, with a detail for the user, and the action."""

    phase: str
    detail: str = ""
    action: HostAction | None = None

    @property
    def is_end(self) -> bool:
        return self.phase in ENDED_PHASES


def decide(view: HostView) -> HostDecision:
    """Return the phase of a host and its next action."""
    reason = _stop_reason(view)
    if _is_last_moment(view):
        return HostDecision(STOPPED, reason or BUDGET, HostAction.DELETE_SLICE)
    if view.service is not None and view.service.is_active:
        if reason is not None:
            return HostDecision(STOPPING, reason, HostAction.STOP_TRAINING)
        if view.notice:
            return HostDecision(PREEMPTING, view.notice)
        is_started = view.host > 0 or bool(view.progress.step)
        return HostDecision(TRAINING if is_started else STARTING, view.program_note)
    return _with_deletion(view, _after_training(view, reason))


BUDGET = "budget: the cap is reached"


def _stop_reason(view: HostView) -> str | None:
    """Return why training must stop now, or None."""
    if view.deadline_at is not None:
        grace = grace_seconds(view.progress.save_seconds)
        # When host 0 stops training, the workers of all hosts end. They must not take this for a preemption.
        is_other_stopped = view.host > 0 and view.service is not None and not view.service.is_active
        delay = 0.0 if is_other_stopped else host_delay_seconds(view.host, grace)
        if view.now >= view.deadline_at - grace + delay:
            return BUDGET
    return None if view.stop_reason is None else f"stop: {view.stop_reason}"


def _is_last_moment(view: HostView) -> bool:
    return view.is_rented and is_last_moment(view.now, view.deadline_at, view.host)


def is_last_moment(now: float, deadline_at: float | None, host: int) -> bool:
    """Return whether a rented slice must be deleted now, whatever it does."""
    return deadline_at is not None and now >= deadline_at - DELETE_SECONDS + host_delay_seconds(host, DELETE_SECONDS)


def _after_training(view: HostView, reason: str | None) -> HostDecision:
    """Return the phase of a host whose training service does not run."""
    setup, _, setup_reason = view.setup.partition(" ")
    code = None if view.service is None else view.service.exit_code
    if setup in (BROKEN, FAILED):  # a setup that fails on this machine may succeed on another
        return HostDecision(BROKEN, setup_reason)
    if code == 0 and reason != BUDGET:
        if view.is_finished:
            return HostDecision(FINISHED, view.export_note)
        if view.host > 0:
            return HostDecision(EXPORTING, "host 0 stores the results")
        return HostDecision(EXPORTING, action=None if view.is_exported else HostAction.EXPORT)
    if view.is_finished:
        return HostDecision(FINISHED)
    if reason is not None:
        return HostDecision(STOPPED, reason)
    if code is None:
        return HostDecision(_SETUP_PHASES.get(setup, setup or INSTALLING))
    if code == STOPPED_CODE or view.notice:
        return HostDecision(PREEMPTING, view.notice or "training was stopped, and not by a request of the user")
    return HostDecision(FAILED, f"forerun train ended with exit code {code}")


def _with_deletion(view: HostView, decision: HostDecision) -> HostDecision:
    """Return the decision with the deletion of the slice, if it is this host's turn."""
    if not decision.is_end or not view.is_rented:
        return decision
    if decision.phase in (FINISHED, STOPPED):
        others = [view.phases.get(host) in ENDED_PHASES for host in range(view.hosts) if host != view.host]
        first = 0.0 if all(others) else LAST_REPORTS_SECONDS
        wait = first if view.host == 0 else OTHER_HOSTS_SECONDS + view.host
    else:
        wait = CONTROLLER_SECONDS + view.host
    is_due = view.ended_seconds >= wait
    return HostDecision(decision.phase, decision.detail, HostAction.DELETE_SLICE if is_due else None)
