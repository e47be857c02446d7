"""Explanations of stalls, failed workers, differing hosts and absent hosts, as texts and errors for the user."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.errors import UserError
from forerun.exit_codes import STOPPED, STORAGE_FAILED, USER_MISTAKE
from forerun.supervise.leader.leader_view import JAX_FRAME, Member
from forerun.supervise.protocol.messages import OUT_OF_MEMORY, WorkerView
from forerun.units import Seconds

# A host computes if it uses more than BUSY cores, and more than TIMES as much as every other host. One limit is not
# enough, because the machines may also be busy with other processes.
BUSY = 0.1
TIMES = 3.0


@dataclass(frozen=True)
class Blame:
    """The host that causes a stall, or None if it is unknown, and the reason."""

    host: int | None
    why: str


def stalled(views: Mapping[int, WorkerView]) -> bool:
    """Return whether the job is stalled.

    Hosts wait for each other inside a step. If one host is in another phase, such as a save, and within the limit of
    that phase, the others may wait for it, and the job is not stalled. A process that a signal stopped for too long
    always means a stall.
    """
    alive = {host: view for host, view in views.items() if view.alive}
    if any(view.halted for view in alive.values()):
        return True
    if not any(view.overdue for view in alive.values()):
        return False
    return all(view.stepping or view.overdue for view in alive.values())


def blame(hosts: Mapping[int, Member]) -> Blame:
    """Return the host that the others wait for, and why.

    The checks run from the strongest evidence to the weakest. If none of them finds one host, `Blame.host` is None.
    """
    # The kernel reports the process as stopped (T, t) or dead (Z, X).
    stopped = [host for host, seen in hosts.items() if seen.view.state in "TtZX"]
    if stopped:
        return _blame(hosts, stopped[0], "its process is stopped" + _also(stopped))
    # Only hosts in another phase than "step": in a step, all hosts are late together.
    late = [host for host, seen in hosts.items() if seen.view.overdue and not seen.view.stepping]
    if late:
        worst = max(late, key=lambda host: hosts[host].view.silent_seconds)
        return _blame(hosts, worst, "it has exceeded the time limit of this phase" + _also(late))
    # Units are common work, so a host that has begun fewer of them holds up the others.
    least = min(seen.view.units for seen in hosts.values())
    behind = [host for host, seen in hosts.items() if seen.view.units == least]
    if len(behind) == 1 and len(hosts) > 1:
        most = max(seen.view.units for seen in hosts.values())
        return _blame(hosts, behind[0], f"it has begun {least} units of work, others {most}")
    if len(hosts) == 1:
        return _blame(hosts, behind[0], "it makes no progress")
    # All hosts have begun the same unit. Hosts that wait for a collective are inside jax.
    elsewhere = [host for host in behind if hosts[host].frames and not hosts[host].is_in_jax]
    if len(elsewhere) == 1:
        return _blame(hosts, elsewhere[0], "the others wait for it inside jax")
    busiest, second = sorted(behind, key=lambda host: hosts[host].busy, reverse=True)[:2]
    if hosts[busiest].busy > max(BUSY, TIMES * hosts[second].busy):
        return _blame(hosts, busiest, f"it computes ({hosts[busiest].busy:.1f} cores) while the others wait")
    # A worker that cannot even handle the signal for its stacks is the last candidate.
    mute = [host for host in behind if not hosts[host].frames]
    if len(mute) == 1:
        return _blame(hosts, mute[0], "it does not report its stack")
    text = "no host differs from the others: each waits inside the same step; the network between them may have failed"
    return Blame(None, text)


def _blame(hosts: Mapping[int, Member], host: int, why: str) -> Blame:
    """Return the blame of `host`, with its progress and the code that it executes."""
    seen = hosts[host]
    where = f", in {seen.frames[0]}" if seen.frames else ""
    caller = next((frame for frame in seen.frames if not JAX_FRAME.search(frame)), None)
    if seen.is_in_jax and caller:
        where += f", called by {caller}"
    view = seen.view
    return Blame(
        host,
        f"host {host} is stuck: step {view.step}, phase '{view.phase}', "
        f"no progress for {Seconds(view.silent_seconds)}{where}; {why}",
    )


def _also(several: list[int]) -> str:
    """Return a note that lists all hosts to which the reason applies, or "" for one host."""
    return f" (this applies to hosts {', '.join(map(str, several))})" if len(several) > 1 else ""


_ERROR_LINE = re.compile(r"Error|error:|bug in forerun")
_FINE = (0, STOPPED)
# Signals that end a worker on its own, and not because another worker failed.
_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_HINTS = {
    signal.SIGKILL: "kill -9, or the kernel because memory ran out: see dmesg | tail",
    signal.SIGBUS: "a mapped file was truncated, or the memory is defective",
}


def fine(member: Member) -> bool:
    """Return whether the worker exited on its own, because it finished or stopped as asked."""
    return member.exit is not None and not member.exit.ended and member.exit.code in _FINE


def died(member: Member) -> bool:
    """Return whether the worker failed on its own. A worker that its supervisor killed did not."""
    return member.exit is not None and not member.exit.ended and member.exit.code not in _FINE


def first_cause(members: Iterable[Member]) -> Member | None:
    """Return the host whose worker caused the failure of the others, or None if no worker failed on its own.

    When one worker fails, its peers fail too: jax aborts (SIGABRT) and gloo raises an exception. Exits that a failed
    peer cannot cause therefore rank first: certain signals, then errors of the user or of storage. SIGABRT and NCCL's
    errors rank last.
    """

    def rank(member: Member) -> int:
        code = member.exit.code if member.exit else 0
        if -code in _CAUSES:
            return 0
        if code in (USER_MISTAKE, STORAGE_FAILED):
            return 1
        return 3 if code == -signal.SIGABRT or _lost_peer(member) else 2

    return min(filter(died, members), key=rank, default=None)


def _lost_peer(member: Member) -> bool:
    """Return whether NCCL failed, which a GPU of another host can cause."""
    return member.exit is not None and "NCCL operation" in member.exit.tail


def is_storage(member: Member | None) -> bool:
    """Return whether the worker failed because of a disk or a bucket, which may recover later."""
    return member is not None and member.exit is not None and member.exit.code == STORAGE_FAILED


def death(member: Member) -> str:
    """Return why the worker failed, for the user: its exit, a hint, and the last line of its errors."""
    assert member.exit is not None
    if "different incarnation" in member.exit.tail:
        return (
            f"another process of the same user joined jax's coordinator, which ended the worker of {member.spoken()}; "
            "look for a second run that uses the same coordinator socket"
        )
    hint = _HINTS.get(signal.Signals(-member.exit.code)) if -member.exit.code in _CAUSES else None
    if member.exit.code == -signal.SIGKILL and OUT_OF_MEMORY in member.exit.tail:
        hint = f"{OUT_OF_MEMORY}; give it more memory, or reduce batch, micro_batch or data.workers"
    if _lost_peer(member):
        hint = "GPUs could not communicate; NCCL_DEBUG=INFO on every host prints the cause"
    lines = [line for line in member.exit.tail.splitlines() if line.strip()]
    error_line = next((line for line in reversed(lines) if _ERROR_LINE.search(line)), lines[-1] if lines else "")
    last = f": {error_line.strip()[:200]}" if error_line and member.exit.code > 0 else ""
    return f"the worker of {member.spoken()} {member.exit.spoken()}{f' ({hint})' if hint else ''}{last}"


def missing(absent: Sequence[int], here: Iterable[Member], seconds: float, address: str, refused: str) -> UserError:
    """Return the error for hosts that did not connect in time."""
    several = len(absent) > 1
    names = ", ".join(map(str, absent))
    present = "; ".join(member.spoken() for member in here) or "no host"
    return UserError(
        "E-HOSTS-030",
        f"host{'s' if several else ''} {names} did not connect within {Seconds(seconds)}",
        why=f"connected to {address}: {present}" + (f"\n{refused}" if refused else ""),
        fix=f"start forerun on host{'s' if several else ''} {names}; check --leader there, and that no firewall "
        f"blocks {address}",
    )


def differing(members: Mapping[int, Member]) -> UserError | None:
    """Return the error for a fact that differs between hosts, or None if all facts are equal."""
    for name in sorted({name for member in members.values() for name in member.facts}):
        values = {index: member.facts[name] for index, member in members.items() if name in member.facts}
        if len(set(values.values())) > 1:
            return difference(name, values)
    return None


def difference(name: str, values: Mapping[int, str]) -> UserError:
    """Return the error for the fact `name`, whose `values` differ between the hosts."""
    fixes = {
        "job": "start every host with the same job file and the same overrides",
        "data digest": "give every host the same data, byte for byte",
        "data and cache digest": "give every host the same folder distil.cache, byte for byte",
        "unroll": "set unroll=true or unroll=false; auto needs the same versions of jax and libtpu on every host",
        "checkpoint": "give every host the same checkpoints: use one file system, or checkpoint.folder=gs://BUCKET/FOLDER",
    }
    return UserError(
        "E-HOSTS-031",
        f"the hosts do not agree: {name}",
        why="; ".join(f"host {index}: {value}" for index, value in sorted(values.items())),
        fix=fixes.get(name, f"install the same {name} on every host"),
    )


def twice(member: Member, name: str, pid: int) -> UserError:
    """Return the error for a second supervisor with the index of `member`."""
    return UserError(
        "E-HOSTS-032",
        f"two supervisors claim to be host {member.index}",
        why=f"process {member.pid} on {member.name} connected first; the other is process {pid} on {name}",
        fix="give each host its own index, from 0 to one less than the number of hosts",
    )
