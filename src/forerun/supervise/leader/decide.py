"""The leader's decisions, as a pure function of its view and the time.

`decide` neither waits, nor sends, nor reads a clock. It returns the new view and the actions that the leader executes
in order. Every rule can therefore be tested without processes, connections or delays. `leader_view` defines the phases:

    Gathering -> Watching -> (Settling | CollectingStacks) -> EndingWorkers -> Pausing -> Gathering ...

Every phase can end the job (`FinishedJob`). After a failure, the leader ends all workers (`EndingWorkers`), because a
collective cannot continue without one of them. The next attempt starts when no worker of the last one is left. Lost
hosts are not waited for: they end their workers themselves, because they have lost the leader too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.exit_codes import STOPPED, USER_MISTAKE
from forerun.supervise.leader import verdicts
from forerun.supervise.leader.blame import blame, stalled
from forerun.supervise.leader.leader_view import (
    CollectingStacks,
    EndingWorkers,
    FinishedJob,
    Gathering,
    LeaderView,
    Pausing,
    Settling,
    StopRequest,
    Watching,
)
from forerun.supervise.leader.member import Member
from forerun.supervise.protocol.ending import Ending
from forerun.supervise.worker.stop import save_fits
from forerun.units import Seconds

REMINDER_SECONDS = 15.0

# Actions, which the leader executes


@dataclass(frozen=True)
class StartWorkers:
    """Store the number of the attempt, then start its worker on every host."""

    attempt: int


@dataclass(frozen=True)
class AskForUnits:
    """Ask the workers of these hosts how many units they have begun. A stop follows within `seconds`."""

    hosts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class StopWorkers:
    """Stop the workers of these hosts after `units` units. `save` permits or forbids a last save."""

    hosts: tuple[int, ...]
    units: int
    save: bool
    seconds: float


@dataclass(frozen=True)
class AskForStacks:
    """Ask every host for the stacks of its worker."""


@dataclass(frozen=True)
class KeepStacks:
    """Write the stacks of one host to the folder of the supervisor."""

    attempt: int
    host: int
    text: str


@dataclass(frozen=True)
class EndWorkers:
    """Make every host end its worker of the attempt."""

    attempt: int


@dataclass(frozen=True)
class CloseTunnels:
    """Close the tunnels to the coordinator of the attempt."""


@dataclass(frozen=True)
class WriteLog:
    """Append a record to the supervisor's log."""

    kind: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Say:
    """Print a message for the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """End the job on every host."""

    ending: Ending


Action = (
    StartWorkers
    | AskForUnits
    | StopWorkers
    | AskForStacks
    | KeepStacks
    | EndWorkers
    | CloseTunnels
    | WriteLog
    | Say
    | Finish
)


@dataclass(frozen=True)
class Decision:
    """The new view, and the actions to execute."""

    view: LeaderView
    actions: tuple[Action, ...] = ()

    def then(self, *actions: Action, **changes: Any) -> Decision:
        """Return this decision with further actions and changes of the view."""
        return Decision(replace(self.view, **changes), (*self.actions, *actions))


def decide(view: LeaderView, now: float) -> Decision:
    """Return the next actions of the leader, and its view afterwards.

    The leader calls this after every batch of events and about once per beat. With many hosts that is often, so the
    function must stay cheap: it does no I/O, and it looks at each host only a few times.

    Args:
        view: The state of the leader, with all events applied.
        now: The time of the monotonic clock that the view's deadlines refer to.

    Returns:
        The new view, and the actions in the order in which the leader executes them.
    """
    decision = _report_stop(Decision(view))
    # One event can cause several transitions: the last idle host ends an attempt, the restart has no delay, and all
    # hosts are connected. Without this loop, each transition would wait for the next event or beat.
    while True:
        phase = decision.view.phase
        decision = _advance(decision, now)
        if decision.view.phase == phase:
            return decision


def _report_stop(decision: Decision) -> Decision:
    """Report a new stop request once, in whatever phase it arrives."""
    stop = decision.view.stop
    if stop is None or stop.reported:
        return decision
    return decision.then(
        WriteLog("stop", {"why": stop.why, "grace_seconds": stop.grace_seconds}),
        Say(f"stopping within {Seconds(stop.grace_seconds)}: {stop.why}"),
        stop=replace(stop, reported=True),
    )


def _advance(decision: Decision, now: float) -> Decision:
    """Return the decision after at most one transition."""
    view = decision.view
    if isinstance(view.phase, FinishedJob):
        return decision
    if view.mistake is not None:  # another attempt would fail in the same way, so it ends every phase
        return _finish(decision, Ending.mistake(view.mistake))
    match view.phase:
        case Gathering():
            return _gather(decision, view.phase, now)
        case Watching():
            return _watch(decision, now)
        case Settling(until):
            # The failure of a worker may be noticed before the loss of a host that caused it, so look for lost hosts
            # again. Without one, the empty text defers the question until all workers have ended.
            return decision if now < until else _end_workers(decision, _lost_hosts(view, now))
        case CollectingStacks(until):
            # A host may be unable to answer, so there is a deadline.
            waits = now < until and any(member.stacks is None for member in view.ordered_members())
            return decision if waits else _name_stalled_host(decision, now)
        case EndingWorkers(outcome):
            # Two attempts must never train at the same time. A lost host cannot confirm the end of its worker.
            waits = any(not member.idle and not member.is_lost(view.limits, now) for member in view.members.values())
            return decision if waits else _conclude_attempt(decision, outcome, now)
        case Pausing(until):
            if now < until and view.stop is None:  # `_gather` ends the job if a stop was announced
                return decision
            return decision.then(phase=Gathering(now, view.limits.reconnect, now))


def _finish(decision: Decision, ending: Ending) -> Decision:
    """End the job. Workers that still run are ended by their supervisors when they receive the ending."""
    return decision.then(CloseTunnels(), Finish(ending), phase=FinishedJob(ending))


# Before an attempt


def _gather(decision: Decision, phase: Gathering, now: float) -> Decision:
    """Start an attempt when all hosts are connected. Give up after the time limit."""
    view = decision.view
    if view.stop is not None:
        return _finish(decision, Ending(STOPPED, f"stopped as asked ({view.stop.why}), between two attempts"))
    absent = view.absent_hosts(now)
    if not absent:
        number = view.attempt + 1
        begun = {index: member.begin() for index, member in view.members.items()}
        return decision.then(StartWorkers(number), attempt=number, members=begun, phase=Watching())
    waited = now - phase.since
    if waited > phase.limit_seconds:
        here = [member for member in view.ordered_members() if member.index not in absent]
        refused = "; ".join(f"refused {address}: {why}" for address, why in view.refused_peers.items())
        error = verdicts.missing(absent, here, phase.limit_seconds, view.hosts.address, refused)
        return _finish(decision, Ending.mistake(error))
    if now - phase.reminded > REMINDER_SECONDS:
        text = f"waiting for host {', '.join(map(str, absent))} ({Seconds(waited)})"
        return decision.then(Say(text), phase=replace(phase, reminded=now))
    return decision


# During an attempt


def _watch(decision: Decision, now: float) -> Decision:
    """Check the running workers. The order of the checks matters: causes come before their consequences."""
    view = decision.view
    members = view.ordered_members()
    if view.start_error is not None:  # no worker was started, so there is nothing else to check
        return _conclude_failed_start(decision, now)
    if all(map(verdicts.fine, members)):
        return _end_workers(decision, _finished_ending(view, members))
    # Before failed workers: when a host is lost, the workers of the others fail because of it.
    if lost := _lost_hosts(view, now):
        return _end_workers(decision, lost)
    # A host that is idle during an attempt lost the leader, ended its worker, and connected again.
    if back := [member for member in members if member.idle]:
        names = ", ".join(member.spoken() for member in back)
        return _end_workers(decision, f"briefly lost the connection to {names}")
    # The first failure that arrives is often a consequence of another one, so wait for the others.
    if any(map(verdicts.died, members)):
        log = WriteLog("death", {"attempt": view.attempt})
        return decision.then(log, phase=Settling(now + view.limits.settle))
    if (difference := verdicts.differing(view.members)) is not None:
        return _finish(decision, Ending.mistake(difference))
    if view.stop is not None:
        decision = _agree_on_stop(decision, view.stop, members, now)
        if view.stop.remaining_seconds(now) == 0:
            text = f"{view.stop.why}: the grace time ended before all hosts had stopped"
            return _end_workers(decision, Ending(STOPPED, text))
    # Last, because the cases above stop progress too.
    if stalled({member.index: member.seen(now) for member in members}):
        log = WriteLog("stall", {"attempt": view.attempt})
        return decision.then(log, AskForStacks(), phase=CollectingStacks(now + view.limits.stacks))
    return decision


def _agree_on_stop(decision: Decision, stop: StopRequest, members: Sequence[Member], now: float) -> Decision:
    """Ask all workers how many units they have begun, then stop all of them after the largest number."""
    alive = [member for member in members if member.exit is None]
    hosts, remaining = tuple(member.index for member in alive), stop.remaining_seconds(now)
    if not stop.asked:
        stop = replace(stop, asked=True)
        decision = decision.then(AskForUnits(hosts, remaining), stop=stop)
    if stop.decided or any(member.begun is None for member in alive):
        return decision
    # A unit that one worker has begun cannot end without the others, so all continue up to the largest number. It stays
    # valid, because a worker that has answered begins no other unit before it gets this decision.
    units = max((member.begun or 0 for member in alive), default=0)
    save = _approves_save(alive, remaining)
    return decision.then(
        StopWorkers(hosts, units, save, remaining),
        WriteLog("agreed", {"units": units, "save": save, "remaining_seconds": remaining}),
        stop=replace(stop, decided=True),
    )


def _approves_save(alive: Sequence[Member], remaining_seconds: float) -> bool:
    """Return whether a save on the slowest host fits into the rest of the grace time."""
    measured = [member.view.save_seconds for member in alive if member.view.save_seconds is not None]
    step_seconds = max((member.view.step_seconds for member in alive), default=0.0)
    return save_fits(max(measured, default=None), remaining_seconds, step_seconds)


def _lost_hosts(view: LeaderView, now: float) -> str:
    """Return a text that names the lost hosts, or "" if no host is lost."""
    lost = [member for member in view.ordered_members() if member.is_lost(view.limits, now)]
    if not lost:
        return ""
    names = ", ".join(member.spoken() for member in lost)
    return f"lost {names}: no message for {Seconds(max(member.silent_seconds(now) for member in lost))}"


def _name_stalled_host(decision: Decision, now: float) -> Decision:
    """End a stalled attempt. Report the host that causes the stall, and store all stacks."""
    view = decision.view
    members = view.ordered_members()
    found = blame({member.index: member.evidence(now) for member in members})
    shown = [(member.index, member.stacks) for member in members if member.stacks]
    text = found.why
    if shown:
        text += f"\n  stacks of all threads: {view.stacks_folder}/stacks-{view.attempt}-*"
    decision = decision.then(
        WriteLog("culprit", {"attempt": view.attempt, "host": found.host}),
        *(KeepStacks(view.attempt, host, stacks) for host, stacks in shown),
    )
    return _end_workers(decision, text)


# After an attempt


def _end_workers(decision: Decision, outcome: Ending | str) -> Decision:
    """End all workers. See `EndingWorkers` for `outcome`."""
    attempt = decision.view.attempt
    if isinstance(outcome, str) and outcome:
        decision = decision.then(WriteLog("fault", {"attempt": attempt, "text": outcome}))
    return decision.then(EndWorkers(attempt), phase=EndingWorkers(outcome))


def _conclude_attempt(decision: Decision, outcome: Ending | str, now: float) -> Decision:
    """End the job or start another attempt, now that no worker is left."""
    view = decision.view
    decision = decision.then(CloseTunnels())
    if outcome == "":  # only now is it known which workers failed on their own, and which ones were killed
        outcome = _cause_of_death(view)
        text = outcome if isinstance(outcome, str) else outcome.text
        decision = decision.then(WriteLog("cause", {"attempt": view.attempt, "text": text}))
    if isinstance(outcome, Ending):
        return _finish(decision, outcome)
    storage = verdicts.is_storage(verdicts.first_cause(view.ordered_members()))
    return _try_again(decision, outcome, now, storage=storage)


def _conclude_failed_start(decision: Decision, now: float) -> Decision:
    """Handle an attempt whose number could not be stored.

    Before the first step, the job ends: the user has just started it and can fix the disk. Later the disk may recover,
    so another attempt follows.
    """
    error = decision.view.start_error
    assert error is not None
    decision = decision.then(start_error=None)
    if not decision.view.tries.best:
        return _finish(decision, Ending.mistake(error))
    return _try_again(decision, f"{error.what}: {error.why}", now, storage=True)


def _try_again(decision: Decision, why: str, now: float, *, storage: bool) -> Decision:
    """Start another attempt after a delay, or end the job if the limits of `RestartPolicy` are reached."""
    view = decision.view
    if view.stop is not None:
        return _finish(decision, Ending(STOPPED, f"stopped as asked ({view.stop.why}); during the stop: {why}"))
    tries = view.tries.cut_short(why, view.reached_step(), now, storage=storage)
    decision = decision.then(tries=tries)
    if (ending := tries.ending()) is not None:
        return _finish(decision, ending)
    return decision.then(Say(f"{why}\n  {tries.spoken()}"), phase=Pausing(now + tries.delay_seconds()))


def _finished_ending(view: LeaderView, members: Sequence[Member]) -> Ending:
    """Return the end of a job whose workers have all exited on their own without an error."""
    if any(member.exit is not None and member.exit.code == STOPPED for member in members):
        why = view.stop.why if view.stop else "by the worker"
        return Ending(STOPPED, f"stopped as asked ({why}) at step {view.reached_step()}")
    return Ending(0)


def _cause_of_death(view: LeaderView) -> Ending | str:
    """Return the end of the job if another attempt would fail too, else a text that names the cause."""
    cause = verdicts.first_cause(view.ordered_members())
    if cause is None or cause.exit is None:
        return "a worker died"
    # As in `_conclude_failed_start`, a disk that fails before the first step ends the job.
    begun = max(view.tries.best, view.reached_step()) > 0
    if cause.exit.code == USER_MISTAKE or (verdicts.is_storage(cause) and not begun):
        text = f"{cause.spoken()} ended the job:\n{cause.exit.tail.strip()}"
        return Ending(cause.exit.code, text, host=cause.index)
    return verdicts.death(cause)
