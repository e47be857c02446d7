"""What a worker was last seen doing, and whether it has been silent for too long."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from forerun.supervise.limits import Limits

RECENT = 200
FEW = 5  # steps whose times say nothing yet
STEP = "step"
STOPPED_BY_SIGNAL = "T"  # as /proc has it


@dataclass(frozen=True)
class View:
    """Of one worker at one moment. `units` counts the pieces of common work that it has begun: hosts agree on them."""

    phase: str = "start"
    step: int = 0
    units: int = 0
    silent_seconds: float = 0.0
    limit_seconds: float = math.inf
    state: str = "?"  # of the process, as /proc has it: R, S, D, T ...
    cpu_seconds: float = 0.0
    save_seconds: float | None = None
    step_seconds: float = 0.0
    alive: bool = True
    halted: bool = False  # by a signal, for longer than a stall may last

    @property
    def overdue(self) -> bool:
        return self.alive and (self.halted or self.silent_seconds > self.limit_seconds)

    @property
    def stepping(self) -> bool:
        return self.phase == STEP


class Progress:
    """Follows one worker's pulse. `now` is a monotonic clock's, in seconds."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._heard = now
        self._stepped: float | None = None
        self._warm = False  # the first step after a phase pays for what comes first, and is no measure
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self.phase, self.step, self.units = "start", 0, 0
        self._before_wait: str | None = None
        self._halted: float | None = None  # since when it is seen stopped by a signal
        self.save_seconds: float | None = None

    def hear(self, message: dict[str, Any], now: float) -> None:
        """A message of the worker: any sign of progress ends the silence."""
        kind = message.get("kind")
        if kind == "phase":
            self.phase, self._stepped, self._warm = str(message["name"]), None, False
        elif kind == "waiting":
            self._before_wait, self.phase = self._before_wait or self.phase, f"waiting for {message['what']}"
        elif kind == "step":
            if self._stepped is not None and self._warm:
                self._seconds.append(now - self._stepped)
            self._warm = self._stepped is not None
            self.phase, self.step, self._stepped = STEP, int(message["step"]), now
        elif kind == "saved":
            self.save_seconds = float(message["seconds"])
        elif kind == "unit":
            self.phase = self._before_wait or self.phase
        else:
            return
        if kind != "waiting":
            self._before_wait = None
        self.units = int(message.get("units", self.units))
        self._heard = now

    def excuse(self, away_seconds: float, now: float) -> None:
        """Who listens stood still itself for so long, and the worker perhaps with it."""
        self._heard = min(now, self._heard + away_seconds)
        if self._halted is not None:
            self._halted = min(now, self._halted + away_seconds)

    def step_seconds(self) -> float:
        """The 99th percentile of the recent ones; 0 if there are none."""
        if not self._seconds:
            return 0.0
        return sorted(self._seconds)[math.ceil(0.99 * len(self._seconds)) - 1]

    def limit_seconds(self) -> float:
        if self.phase != STEP:
            return self._limits.phase_seconds(self.phase)
        if len(self._seconds) < FEW:
            return self._limits.phase_seconds("first steps")
        return self._stall_seconds()

    def _stall_seconds(self) -> float:
        limits = self._limits
        return limits.stall * max(limits.stall_floor, limits.stall_steps * self.step_seconds())

    def view(self, now: float, *, state: str, cpu_seconds: float, alive: bool) -> View:
        """A process that a signal has stopped makes no progress in any phase, however long the phase may last."""
        self._halted = (self._halted if self._halted is not None else now) if state == STOPPED_BY_SIGNAL else None
        return View(
            phase=self.phase,
            step=self.step,
            units=self.units,
            silent_seconds=now - self._heard,
            limit_seconds=self.limit_seconds(),
            state=state,
            cpu_seconds=cpu_seconds,
            save_seconds=self.save_seconds,
            step_seconds=self.step_seconds(),
            alive=alive,
            halted=self._halted is not None and now - self._halted > self._stall_seconds(),
        )
