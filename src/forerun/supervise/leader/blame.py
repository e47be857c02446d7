"""Detection of stalls: whether a job is stalled, and which host the others wait for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.supervise.protocol.worker_state import WorkerView
from forerun.units import Seconds

# A host computes if it uses more than BUSY cores, and more than TIMES as much as every other host. One limit is not
# enough, because the machines may also be busy with other processes.
BUSY = 0.1
TIMES = 3.0
_IN_JAX = re.compile(r"[/(]jax(lib)?/|/jax[/_]|/jaxlib[/_]")


@dataclass(frozen=True)
class Evidence:
    """What is known about the worker of one host.

    `frames` is the stack of its main thread, innermost first. `busy` is the number of cores that it used recently.
    """

    view: WorkerView
    frames: tuple[str, ...] = ()
    busy: float = 0.0

    @property
    def in_jax(self) -> bool:
        """Whether the main thread is inside jax, as on hosts that wait for another host."""
        return bool(self.frames) and _IN_JAX.search(self.frames[0]) is not None


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


def blame(hosts: Mapping[int, Evidence]) -> Blame:
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
    elsewhere = [host for host in behind if hosts[host].frames and not hosts[host].in_jax]
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


def _blame(hosts: Mapping[int, Evidence], host: int, why: str) -> Blame:
    """Return the blame of `host`, with its progress and the code that it executes."""
    seen = hosts[host]
    where = f", in {seen.frames[0]}" if seen.frames else ""
    caller = next((frame for frame in seen.frames if not _IN_JAX.search(frame)), None)
    if seen.in_jax and caller:
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
