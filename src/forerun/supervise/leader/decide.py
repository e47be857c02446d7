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
from forerun.supervise.leader.actions import (
    CloseTunnels,
    Decision,
    KeepStacks,
    Say,
    Send,
    StartWorkers,
    WriteLog,
)
from forerun.supervise.leader.leader_view import (
    CollectingStacks,
    EndingWorkers,
    FinishedJob,
    Gathering,
    LeaderView,
    Member,
    MoreSlices,
    Pausing,
    Settling,
    StopRequest,
    Watching,
)
from forerun.supervise.leader.verdicts import (
    blame,
    death,
    died,
    differing,
    fine,
    first_cause,
    is_storage,
    missing,
    stalled,
)
from forerun.supervise.protocol.messages import AskStacks, AskUnits, Ending, EndWorker, StopAfter
from forerun.supervise.worker_stop import save_fits
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
    if all(map(fine, members)):
        return _end_workers(decision, _finished_ending(view, members))
    # Before failed workers: when a host is lost, the workers of the others fail because of it.
    if lost := _lost_hosts(view, now):
        return _end_workers(decision, lost)
    # A host that is idle during an attempt lost the leader, ended its worker, and connected again.
    if back := [member for member in members if member.idle]:
        names = ", ".join(member.spoken() for member in back)
        return _end_workers(decision, f"briefly lost the connection to {names}")
    # The first failure that arrives is often a consequence of another one, so wait for the others.
    if any(map(died, members)):
        log = WriteLog("death", {"attempt": view.attempt})
        return decision.then(log, phase=Settling(now + view.limits.settle))
    if (difference := differing(view.members)) is not None:
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
        return decision.then(log, Send(AskStacks()), phase=CollectingStacks(now + view.limits.stacks))
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
    found = blame({member.index: replace(member, view=member.seen(now)) for member in members})
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
    return decision.then(Send(EndWorker(attempt)), phase=EndingWorkers(outcome))


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
    storage = is_storage(first_cause(view.ordered_members()))
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
    cause = first_cause(view.ordered_members())
    if cause is None or cause.exit is None:
        return "a worker died"
    # As in `_conclude_failed_start`, a disk that fails before the first step ends the job.
    begun = max(view.tries.best, view.reached_step()) > 0
    if cause.exit.code == USER_MISTAKE or (is_storage(cause) and not begun):
        text = f"{cause.spoken()} ended the job:\n{cause.exit.tail.strip()}"
        return Ending(cause.exit.code, text, host=cause.index)
    return death(cause)


REMINDER_SECONDS = 15.0


def gather(decision: Decision, phase: Gathering, now: float) -> Decision:
    """Start an attempt when all hosts are connected, or without lost slices. Give up after the time limit.

    A slice that was lost is waited for `mesh.slice_wait_seconds`. The first attempt waits for all slices as long as a
    run without `mesh.min_slices` does.
    """
    view = decision.view
    if view.stop is not None:
        return decision.finished(Ending(STOPPED, f"stopped as asked ({view.stop.why}), between two attempts"))
    absent = view.absent_hosts(now)
    if not absent:
        return _start(decision, tuple(range(view.hosts.count)))
    waited, policy = now - phase.since, view.policy
    remaining = policy.remaining_hosts(absent)
    limit_seconds = max(phase.limit_seconds, policy.wait_seconds) if remaining else phase.limit_seconds
    # Before the first attempt, an absent host is probably late and not lost.
    patience_seconds = policy.wait_seconds if view.taking_part else limit_seconds
    if remaining and (waited >= patience_seconds or not _took_part(view, absent)):
        return _start_without(decision, absent, remaining)
    if waited > limit_seconds:
        here = [view.members[index] for index in sorted(view.members) if index not in absent]
        refused = [f"refused {address}: {why}" for address, why in view.refused_peers.items()]
        notes = "; ".join([*refused, policy.requirement()] if policy.is_elastic else refused)
        error = missing(absent, here, limit_seconds, view.hosts.address, notes)
        return decision.finished(Ending.mistake(error))
    if now - phase.reminded > REMINDER_SECONDS:
        text = f"waiting for host {', '.join(map(str, absent))} ({Seconds(waited)})"
        if remaining:
            text += f"; continuing without {policy.spoken(absent)} in {Seconds(patience_seconds - waited)}"
        return decision.then(Say(text), phase=replace(phase, reminded=now))
    return decision


def _took_part(view: LeaderView, absent: Sequence[int]) -> bool:
    """Return whether the last attempt had a slice that is lost now. A slice is waited for once, when it is lost."""
    taking_part = view.policy.slices_of(view.taking_part)
    return not taking_part or any(number in taking_part for number in view.policy.slices_of(absent))


def _start_without(decision: Decision, absent: Sequence[int], hosts: tuple[int, ...]) -> Decision:
    """Start an attempt on the hosts of the remaining slices, and report the lost ones."""
    policy = decision.view.policy
    count = policy.count_of(hosts)
    text = (
        f"{policy.spoken(absent)} did not connect: continuing with {count} of {policy.slices} slices and the same "
        f"batch; the run returns to {policy.slices} slices when the missing hosts are started again"
    )
    log = WriteLog("fewer slices", {"slices": count, "of": policy.slices, "absent": list(absent)})
    return _start(decision.then(Say(text), log), hosts)


def _start(decision: Decision, hosts: tuple[int, ...]) -> Decision:
    """Start an attempt on these hosts."""
    number = decision.view.attempt + 1
    start = StartWorkers(number, hosts, decision.view.policy.count_of(hosts))
    return Decision(decision.view.started(number, hosts), (*decision.actions, start))


def agree_on_stop(decision: Decision, stop: StopRequest, members: Sequence[Member], now: float) -> Decision:
    """Ask all workers how many units they have begun, then stop all of them after the largest number."""
    decision, stop = _agree(decision, stop, members, now, ends_job=True)
    return decision.then(stop=stop)


def agree_on_growth(decision: Decision, growth: StopRequest, members: Sequence[Member], now: float) -> Decision:
    """Stop all workers like `agree_on_stop`, so that the next attempt has more slices. Report it once."""
    if not growth.reported:
        slices = decision.view.policy.count_of(decision.view.taking_part)
        log = WriteLog("more slices", {"attempt": decision.view.attempt, "slices": slices})
        decision = decision.then(log, Say(f"{growth.why}: saving a checkpoint, then restarting with it"))
        growth = replace(growth, reported=True)
    decision, growth = _agree(decision, growth, members, now, ends_job=False)
    return decision.then(growth=growth)


def possible_growth(view: LeaderView, now: float) -> StopRequest | None:
    """Return the stop that an attempt with fewer slices needs, because a lost slice is complete again, or None."""
    if len(view.taking_part) == view.hosts.count:
        return None
    absent = view.absent_hosts(now)
    available = view.policy.remaining_hosts(absent) if absent else tuple(range(view.hosts.count))
    back = set(available) - set(view.taking_part)
    if not back:
        return None
    # A save may take as long as the phase of a save, and no host is about to be stopped.
    seconds = view.limits.phase_seconds("save")
    return StopRequest(f"{view.policy.spoken(back)} is connected again", now + seconds, seconds)


def _agree(
    decision: Decision, stop: StopRequest, members: Sequence[Member], now: float, *, ends_job: bool
) -> tuple[Decision, StopRequest]:
    """Return the decision with the next step of the agreement, and the stop with what is done."""
    alive = [member for member in members if member.exit is None]
    hosts, remaining = tuple(member.index for member in alive), stop.remaining_seconds(now)
    if not stop.asked:
        stop = replace(stop, asked=True)
        decision = decision.then(Send(AskUnits(remaining, ends_job), hosts))
    if stop.decided or any(member.begun is None for member in alive):
        return decision, stop
    # A unit that one worker has begun cannot end without the others, so all continue up to the largest number. It stays
    # valid, because a worker that has answered begins no other unit before it gets this decision.
    units = max((member.begun or 0 for member in alive), default=0)
    save = _approves_save(alive, remaining)
    decision = decision.then(
        Send(StopAfter(units, save, remaining, ends_job), hosts),
        WriteLog("agreed", {"units": units, "save": save, "remaining_seconds": remaining}),
    )
    return decision, replace(stop, decided=True)


def _approves_save(alive: Sequence[Member], remaining_seconds: float) -> bool:
    """Return whether a save on the slowest host fits into the rest of the grace time."""
    measured = [member.view.save_seconds for member in alive if member.view.save_seconds is not None]
    step_seconds = max((member.view.step_seconds for member in alive), default=0.0)
    return save_fits(max(measured, default=None), remaining_seconds, step_seconds)
