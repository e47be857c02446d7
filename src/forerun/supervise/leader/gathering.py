"""The start of an attempt: the leader waits for all hosts, or continues with the slices that are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.exit_codes import STOPPED
from forerun.supervise.leader import verdicts
from forerun.supervise.leader.actions import Decision, Say, StartWorkers, WriteLog
from forerun.supervise.leader.leader_view import Gathering, LeaderView
from forerun.supervise.protocol.ending import Ending
from forerun.units import Seconds

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
        error = verdicts.missing(absent, here, limit_seconds, view.hosts.address, notes)
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
