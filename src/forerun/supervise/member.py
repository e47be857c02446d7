"""The leader's knowledge of one host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.supervise.child import Exit
from forerun.supervise.culprit import Evidence
from forerun.supervise.progress import View
from forerun.supervise.wire import Line


@dataclass
class Member:
    index: int
    instance: str
    name: str
    pid: int
    line: Line | None
    heard: float = field(default_factory=time.monotonic)
    step: int = 0
    view: View = field(default_factory=View)
    facts: dict[str, str] = field(default_factory=dict)
    exit: Exit | None = None
    idle: bool = True
    begun: int | None = None
    frames: tuple[str, ...] = ()
    stacks: str | None = None
    busy: float = 0.0

    def begin(self) -> None:
        """A new attempt: what was known of the last one is past."""
        self.view, self.facts, self.exit, self.idle, self.begun = View(), {}, None, False, None
        self.frames, self.stacks, self.busy, self.step = (), None, 0.0, 0

    def send(self, message: dict[str, Any]) -> None:
        if self.line is not None:
            self.line.send(message)

    def hear(self, message: dict[str, Any], attempt: int) -> None:
        """What it says of its worker, if it is about this attempt."""
        self.heard = time.monotonic()
        if message.get("attempt") != attempt:
            return
        match message["kind"]:
            case "beat":
                self.view, self.facts = View(**message["view"]), message["facts"]
                self.step = max(self.step, self.view.step)
            case "exited":
                self.exit = Exit(int(message["code"]), bool(message["ended"]), str(message["tail"]))
                self.view = replace(self.view, alive=False)
                self.step = max(self.step, int(message["step"]))
            case "idle":
                self.idle = True
            case "begun":
                self.begun = int(message["units"])
            case "stacks":
                self.frames = tuple(message["frames"])
                self.stacks, self.busy = str(message["text"]), float(message["busy"])

    def excuse(self, away_seconds: float) -> None:
        """We stood still ourselves for so long (Ctrl-Z, a machine that was paused): what it said is still unheard."""
        self.heard = min(time.monotonic(), self.heard + away_seconds)

    def silent_seconds(self) -> float:
        return time.monotonic() - self.heard

    def seen(self) -> View:
        """The last view, as old as it is by now."""
        return replace(self.view, silent_seconds=self.view.silent_seconds + self.silent_seconds())

    def evidence(self) -> Evidence:
        return Evidence(self.seen(), self.frames, self.busy)

    def spoken(self) -> str:
        return f"host {self.index} ({self.name})"
