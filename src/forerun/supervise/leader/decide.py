"""The leader's decisions, as a pure function of its view and the time.

`decide` neither waits, nor sends, nor reads a clock. It returns the new view and the actions that the leader executes
in order. Every rule can therefore be tested without processes, connections or delays. `leader_view` defines the phases:

    Gathering -> Watching -> (Settling | CollectingStacks) -> EndingWorkers -> Pausing -> Gathering ...

Every phase can end the job (`FinishedJob`). After a failure, the leader ends all workers (`EndingWorkers`), because a
collective cannot continue without one of them. The next attempt starts when no worker of the last one is left. Lost
hosts are not waited for: they end their workers themselves, because they have lost the leader too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.exit_codes import STOPPED, USER_MISTAKE
from forerun.supervise.leader import verdicts
from forerun.supervise.leader.actions import (
    AskForStacks,
    CloseTunnels,
    Decision,
    EndWorkers,
    KeepStacks,
    Say,
    WriteLog,
)
from forerun.supervise.leader.agreement import agree_on_growth, agree_on_stop, possible_growth
from forerun.supervise.leader.blame import blame, stalled
from forerun.supervise.leader.gathering import gather
from forerun.supervise.leader.leader_view import (
    CollectingStacks,
    EndingWorkers,
    FinishedJob,
    Gathering,
    LeaderView,
    MoreSlices,
    Pausing,
    Settling,
    Watching,
)
from forerun.supervise.leader.member import Member
from forerun.supervise.protocol.ending import Ending
from forerun.units import Seconds


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
        return decision.finished(Ending.mistake(view.mistake))
    match view.phase:
        case Gathering():
            return gather(decision, view.phase, now)
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
            if now < until and view.stop is None:  # `gather` ends the job if a stop was announced
                return decision
            return decision.then(phase=Gathering(now, view.limits.reconnect, now))


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
        return decision.finished(Ending.mistake(difference))
    if view.stop is not None:
        decision = agree_on_stop(decision, view.stop, members, now)
        if view.stop.remaining_seconds(now) == 0:
            text = f"{view.stop.why}: the grace time ended before all hosts had stopped"
            return _end_workers(decision, Ending(STOPPED, text))
    elif (growth := view.growth or possible_growth(view, now)) is not None:
        decision = agree_on_growth(decision, growth, members, now)
        if growth.remaining_seconds(now) == 0:
            return _end_workers(decision, f"{growth.why}, but the workers did not stop for it in time")
    # Last, because the cases above stop progress too.
    if stalled({member.index: member.seen(now) for member in members}):
        log = WriteLog("stall", {"attempt": view.attempt})
        return decision.then(log, AskForStacks(), phase=CollectingStacks(now + view.limits.stacks))
    return decision


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


def _end_workers(decision: Decision, outcome: Ending | MoreSlices | str) -> Decision:
    """End all workers. See `EndingWorkers` for `outcome`."""
    attempt = decision.view.attempt
    if isinstance(outcome, str) and outcome:
        decision = decision.then(WriteLog("fault", {"attempt": attempt, "text": outcome}))
    return decision.then(EndWorkers(attempt), phase=EndingWorkers(outcome))


def _conclude_attempt(decision: Decision, outcome: Ending | MoreSlices | str, now: float) -> Decision:
    """End the job or start another attempt, now that no worker is left."""
    view = decision.view
    decision = decision.then(CloseTunnels())
    if outcome == "":  # only now is it known which workers failed on their own, and which ones were killed
        outcome = _cause_of_death(view)
        text = outcome if isinstance(outcome, str) else outcome.text
        decision = decision.then(WriteLog("cause", {"attempt": view.attempt, "text": text}))
    if isinstance(outcome, Ending):
        return decision.finished(outcome)
    if isinstance(outcome, MoreSlices):
        tries = view.tries.advance(outcome.step, now)
        return decision.then(tries=tries, phase=Gathering(now, view.limits.reconnect, now))
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
        return decision.finished(Ending.mistake(error))
    return _try_again(decision, f"{error.what}: {error.why}", now, storage=True)


def _try_again(decision: Decision, why: str, now: float, *, storage: bool) -> Decision:
    """Start another attempt after a delay, or end the job if the limits of `RestartPolicy` are reached."""
    view = decision.view
    if view.stop is not None:
        return decision.finished(Ending(STOPPED, f"stopped as asked ({view.stop.why}); during the stop: {why}"))
    tries = view.tries.cut_short(why, view.reached_step(), now, storage=storage)
    decision = decision.then(tries=tries)
    if (ending := tries.ending()) is not None:
        return decision.finished(ending)
    return decision.then(Say(f"{why}\n  {tries.spoken()}"), phase=Pausing(now + tries.delay_seconds()))


def _finished_ending(view: LeaderView, members: Sequence[Member]) -> Ending | MoreSlices:
    """Return the outcome of an attempt whose workers have all exited on their own without an error."""
    if any(member.exit is not None and member.exit.code == STOPPED for member in members):
        if view.stop is None and view.growth is not None:
            return MoreSlices(view.reached_step())
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
