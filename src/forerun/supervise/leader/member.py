"""The leader's knowledge of one host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forerun.supervise.leader.blame import Evidence
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Exited, FromHost, HostBeat, HostStacks, HostUnits, Idle
from forerun.supervise.protocol.worker_state import WorkerExit, WorkerView


@dataclass(frozen=True)
class Member:
    """One host, as the leader knows it. `now` is the time of the leader's monotonic clock."""

    index: int
    instance: str
    name: str
    pid: int
    heard: float  # when its last message arrived
    connected: bool = True
    step: int = 0  # the highest step that it reported
    view: WorkerView = field(default_factory=WorkerView)
    facts: Mapping[str, str] = field(default_factory=dict)
    exit: WorkerExit | None = None
    idle: bool = True  # it has no worker of the current attempt
    begun: int | None = None  # units, its answer to `AskUnits`
    frames: tuple[str, ...] = ()
    stacks: str | None = None
    busy: float = 0.0

    def begin(self) -> Member:
        """Return the host at the start of an attempt, without the data of the last one."""
        return Member(self.index, self.instance, self.name, self.pid, self.heard, self.connected, idle=False)

    def hear(self, message: FromHost, attempt: int, now: float) -> Member:
        """Return the host after a message. A message about another attempt only shows that the host is alive."""
        known = replace(self, heard=now)
        if getattr(message, "attempt", None) != attempt:
            return known
        match message:
            case HostBeat(view=WorkerView() as view, facts=facts):
                return replace(known, view=view, facts=facts or {}, step=max(self.step, view.step))
            case Exited():
                return replace(
                    known,
                    exit=WorkerExit(message.code, message.ended, message.tail),
                    view=replace(self.view, alive=False),
                    step=max(self.step, message.step),
                )
            case Idle():
                return replace(known, idle=True)
            case HostUnits():
                return replace(known, begun=message.units)
            case HostStacks():
                return replace(known, frames=message.frames, stacks=message.text, busy=message.busy)
        return known

    def excuse(self, away_seconds: float, now: float) -> Member:
        """Return the host after the leader did not run for `away_seconds`, in which it could not read messages."""
        return replace(self, heard=min(now, self.heard + away_seconds))

    def silent_seconds(self, now: float) -> float:
        """Return the time since the last message."""
        return now - self.heard

    def is_lost(self, limits: Limits, now: float) -> bool:
        """Return whether the host is disconnected, or has been silent for longer than `limits.lost`."""
        return not self.connected or self.silent_seconds(now) > limits.lost

    def seen(self, now: float) -> WorkerView:
        """Return the last view of the worker. The time since then counts as time without progress."""
        return replace(self.view, silent_seconds=self.view.silent_seconds + self.silent_seconds(now))

    def evidence(self, now: float) -> Evidence:
        """Return what `blame` needs to know about the host."""
        return Evidence(self.seen(now), self.frames, self.busy)

    def spoken(self) -> str:
        """Return the name of the host for messages, such as "host 1 (worker-1)"."""
        return f"host {self.index} ({self.name})"
