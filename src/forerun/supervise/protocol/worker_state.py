"""The state of one worker: its progress at one moment, and its exit."""

from __future__ import annotations

import math
import signal
from contextlib import suppress
from dataclasses import dataclass

STEP = "step"


@dataclass(frozen=True)
class WorkerView:
    """The progress of one worker at one moment.

    `units` counts the units of common work, such as steps, that the worker has begun. All hosts count the same units.
    """

    phase: str = "start"
    step: int = 0
    units: int = 0
    silent_seconds: float = 0.0  # since the last report of progress
    limit_seconds: float = math.inf  # of `silent_seconds`, in this phase
    state: str = "?"  # the letter of the process state in /proc: R, S, D, T ...
    cpu_seconds: float = 0.0
    save_seconds: float | None = None  # of the last committed save
    step_seconds: float = 0.0  # the 99th percentile
    alive: bool = True
    halted: bool = False  # a signal stopped the process for longer than a stall may last
    memory: str = "RAM"  # what `memory_bytes` counts: `RAM` of the process, or `HBM` of its fullest device
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None

    @property
    def overdue(self) -> bool:
        """Whether the worker has exceeded its limit without progress."""
        return self.alive and (self.halted or self.silent_seconds > self.limit_seconds)

    @property
    def stepping(self) -> bool:
        """Whether the worker makes steps, rather than being in another phase."""
        return self.phase == STEP


@dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker. `code` is negative if a signal ended it. `ended` is true if its supervisor killed it."""

    code: int
    ended: bool
    tail: str  # the end of its stderr

    def spoken(self) -> str:
        """Return a phrase that describes the exit, such as "was killed by SIGKILL"."""
        if self.code >= 0:
            return f"exited with code {self.code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"was killed by signal {-self.code}"
