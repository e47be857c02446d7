"""What the leader makes of deaths, differences and absences: causes before consequences, in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence

from forerun.errors import STORAGE_FAILED, USER_MISTAKE, UserError
from forerun.supervise.limits import STOPPED
from forerun.supervise.member import Member
from forerun.supervise.memory import MARK
from forerun.units import Seconds

_TELLING = re.compile(r"Error|error:|bug in forerun")
_FINE = (0, STOPPED)
_CAUSES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_HINTS = {
    signal.SIGKILL: "kill -9, or the kernel for want of memory: dmesg | tail tells",
    signal.SIGBUS: "a file that shrank under it, or bad memory",
}


def fine(member: Member) -> bool:
    return member.exit is not None and not member.exit.ended and member.exit.code in _FINE


def died(member: Member) -> bool:
    return member.exit is not None and not member.exit.ended and member.exit.code not in _FINE


def first_cause(members: Iterable[Member]) -> Member | None:
    """Of workers that died by themselves, the one whose death the others' follow from. jax aborts (SIGABRT), and gloo
    raises, where a peer is gone: these come last."""

    def rank(member: Member) -> int:
        code = member.exit.code if member.exit else 0
        if -code in _CAUSES:
            return 0
        return 1 if code in (USER_MISTAKE, STORAGE_FAILED) else 2 if code != -signal.SIGABRT else 3

    return min(filter(died, members), key=rank, default=None)


def is_storage(member: Member | None) -> bool:
    """It died of a disk or a bucket that fails, which may be well again later."""
    return member is not None and member.exit is not None and member.exit.code == STORAGE_FAILED


def death(member: Member) -> str:
    assert member.exit is not None
    if "different incarnation" in member.exit.tail:
        return (
            f"another process of the same user joined jax's coordinator, which ended the worker of {member.spoken()}; "
            "look for a second run that uses the same coordinator socket"
        )
    hint = _HINTS.get(signal.Signals(-member.exit.code)) if -member.exit.code in _CAUSES else None
    if member.exit.code == -signal.SIGKILL and MARK in member.exit.tail:
        hint = f"{MARK}; give it more, or less to do: a smaller batch or micro_batch, fewer data.workers"
    lines = [line for line in member.exit.tail.splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if _TELLING.search(line)), lines[-1] if lines else "")
    last = f": {told.strip()[:200]}" if told and member.exit.code > 0 else ""
    return f"the worker of {member.spoken()} {member.exit.spoken()}{f' ({hint})' if hint else ''}{last}"


def missing(absent: Sequence[int], here: Iterable[Member], seconds: float, address: str, strangers: str) -> UserError:
    several = len(absent) > 1
    names = ", ".join(map(str, absent))
    present = "; ".join(member.spoken() for member in here) or "nobody"
    return UserError(
        f"host{'s' if several else ''} {names} did not come within {Seconds(seconds)}",
        why=f"at {address} there are: {present}" + (f"\n{strangers}" if strangers else ""),
        fix=f"start the supervisor of host{'s' if several else ''} {names}, or see whether a firewall or "
        f"a wrong address keeps it from {address}",
    )


def differing(members: Mapping[int, Member]) -> UserError | None:
    """A fact that must be the same on all hosts, and is not."""
    for name in sorted({name for member in members.values() for name in member.facts}):
        values = {index: member.facts[name] for index, member in members.items() if name in member.facts}
        if len(set(values.values())) > 1:
            return difference(name, values)
    return None


def difference(name: str, values: Mapping[int, str]) -> UserError:
    fixes = {
        "job": "start every host with the same job file and the same overrides",
        "data digest": "give every host the same data, byte for byte",
        "data and cache digest": "give every host the same folder distil.cache, byte for byte",
        "checkpoint": "let every host see the same checkpoints: one file system, or checkpoint.folder=gs://BUCKET/FOLDER",
    }
    return UserError(
        f"the hosts do not agree: {name}",
        why="; ".join(f"host {index}: {value}" for index, value in sorted(values.items())),
        fix=fixes.get(name, f"install the same {name} on every host"),
    )


def twice(member: Member, name: str, pid: int) -> UserError:
    return UserError(
        f"two supervisors say that they are host {member.index}",
        why=f"process {member.pid} on {member.name} was here first; the other is process {pid} on {name}",
        fix="give each host an index of its own, from 0 to one less than the number of hosts",
    )
