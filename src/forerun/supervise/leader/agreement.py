"""The agreement of all workers on the unit after which they stop, for an announced stop or for more slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.supervise.leader.actions import AskForUnits, Decision, Say, StopWorkers, WriteLog
from forerun.supervise.leader.leader_view import LeaderView, StopRequest
from forerun.supervise.leader.member import Member
from forerun.supervise.worker.stop import save_fits


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
        decision = decision.then(AskForUnits(hosts, remaining, ends_job))
    if stop.decided or any(member.begun is None for member in alive):
        return decision, stop
    # A unit that one worker has begun cannot end without the others, so all continue up to the largest number. It stays
    # valid, because a worker that has answered begins no other unit before it gets this decision.
    units = max((member.begun or 0 for member in alive), default=0)
    save = _approves_save(alive, remaining)
    decision = decision.then(
        StopWorkers(hosts, units, save, remaining, ends_job),
        WriteLog("agreed", {"units": units, "save": save, "remaining_seconds": remaining}),
    )
    return decision, replace(stop, decided=True)


def _approves_save(alive: Sequence[Member], remaining_seconds: float) -> bool:
    """Return whether a save on the slowest host fits into the rest of the grace time."""
    measured = [member.view.save_seconds for member in alive if member.view.save_seconds is not None]
    step_seconds = max((member.view.step_seconds for member in alive), default=0.0)
    return save_fits(max(measured, default=None), remaining_seconds, step_seconds)
