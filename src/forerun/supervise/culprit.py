"""Who is to blame when nothing moves: the host that the others wait for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.supervise.progress import View
from forerun.units import Seconds

BUSY = 0.1  # cores, and so many times as much as any of those who wait: the machine may be busy with others too
TIMES = 3.0
_IN_JAX = re.compile(r"[/(]jax(lib)?/|/jax[/_]|/jaxlib[/_]")


@dataclass(frozen=True)
class Evidence:
    """Of one host. `frames`: its main thread, innermost first. `busy`: cores used lately."""

    view: View
    frames: tuple[str, ...] = ()
    busy: float = 0.0

    @property
    def in_jax(self) -> bool:
        """Whether the main thread is inside jax, where those who wait for others are."""
        return bool(self.frames) and _IN_JAX.search(self.frames[0]) is not None


@dataclass(frozen=True)
class Verdict:
    host: int | None
    why: str


def stalled(views: Mapping[int, View]) -> bool:
    """Whether the job stands still. Hosts wait for one another, so one that is inside a phase of its own, and within
    that phase's limit, excuses them all; but nothing excuses one that a signal has stopped."""
    alive = {host: view for host, view in views.items() if view.alive}
    if any(view.halted for view in alive.values()):
        return True
    if not any(view.overdue for view in alive.values()):
        return False
    return all(view.stepping or view.overdue for view in alive.values())


def blame(hosts: Mapping[int, Evidence]) -> Verdict:
    """The host that holds the others up, from the surest sign to the weakest; None if nothing tells them apart."""
    stopped = [host for host, seen in hosts.items() if seen.view.state in "TtZX"]
    if stopped:
        return _verdict(hosts, stopped[0], "its process is stopped" + _also(stopped))
    late = [host for host, seen in hosts.items() if seen.view.overdue and not seen.view.stepping]
    if late:
        worst = max(late, key=lambda host: hosts[host].view.silent_seconds)
        return _verdict(hosts, worst, "it does not come out of this phase" + _also(late))
    least = min(seen.view.units for seen in hosts.values())
    behind = [host for host, seen in hosts.items() if seen.view.units == least]
    if len(behind) == 1 and len(hosts) > 1:
        most = max(seen.view.units for seen in hosts.values())
        return _verdict(hosts, behind[0], f"it has begun {least} pieces of work, others {most}")
    if len(hosts) == 1:
        return _verdict(hosts, behind[0], "it does not go on")
    elsewhere = [host for host in behind if hosts[host].frames and not hosts[host].in_jax]
    if len(elsewhere) == 1:
        return _verdict(hosts, elsewhere[0], "the others wait for it inside jax")
    busiest, second = sorted(behind, key=lambda host: hosts[host].busy, reverse=True)[:2]
    if hosts[busiest].busy > max(BUSY, TIMES * hosts[second].busy):
        return _verdict(hosts, busiest, f"it computes ({hosts[busiest].busy:.1f} cores) while the others wait")
    mute = [host for host in behind if not hosts[host].frames]
    if len(mute) == 1:
        return _verdict(hosts, mute[0], "it does not show its stack")
    text = "no host can be told from the others: each waits inside the same step (the network between them?)"
    return Verdict(None, text)


def _verdict(hosts: Mapping[int, Evidence], host: int, why: str) -> Verdict:
    seen = hosts[host]
    where = f", in {seen.frames[0]}" if seen.frames else ""
    caller = next((frame for frame in seen.frames if not _IN_JAX.search(frame)), None)
    if seen.in_jax and caller:
        where += f", called by {caller}"
    view = seen.view
    return Verdict(
        host,
        f"host {host} is stuck: step {view.step}, phase '{view.phase}', "
        f"silent for {Seconds(view.silent_seconds)}{where}; {why}",
    )


def _also(several: list[int]) -> str:
    return f" (so are hosts {', '.join(map(str, several))})" if len(several) > 1 else ""
