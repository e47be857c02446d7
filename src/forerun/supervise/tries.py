"""Attempts at a job, counted: whether there is to be another, and how much later."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.supervise.ending import Ending
from forerun.supervise.limits import ENDED, Limits
from forerun.units import Seconds


@dataclass
class Tries:
    """`fruitless` attempts have come no further than step `best`. A failing disk or bucket (`storage`) is waited for
    by the clock, whatever the number of tries: it may be well again by itself. `now` is a monotonic clock's."""

    limits: Limits
    best: int = 0
    fruitless: int = 0
    storage: bool = False
    _incidents: list[str] = field(default_factory=list)
    _since: float = 0.0
    _waited: float = 0.0

    def cut_short(self, why: str, reached: int, now: float, *, storage: bool = False) -> None:
        """An attempt has ended before the job did."""
        if reached > self.best:
            self.best, self.fruitless, self._since, self._incidents = reached, 0, now, []
        self.fruitless += 1
        self.storage, self._waited = storage, now - self._since
        self._incidents = [*self._incidents, why][-self.limits.restarts - 1 :]

    def ending(self) -> Ending | None:
        """If there is to be no other."""
        if self.fruitless <= self.limits.restarts or (self.storage and self._waited < self.limits.storage):
            return None
        listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(self._incidents, 1))
        last = "" if len(self._incidents) == self.fruitless else ", the last of them:"
        return Ending(
            ENDED, f"given up: {self.fruitless} attempts have not come further than step {self.best}{last}\n{listed}"
        )

    def delay_seconds(self) -> float:
        """What fails for a while is not asked again at once."""
        return self.limits.restart_delay_seconds(self.fruitless + self.storage)

    def spoken(self) -> str:
        delay = self.delay_seconds()
        later = f", in {Seconds(delay)}" if delay else ""
        if self.fruitless == 1:
            return f"restarting{later}"
        if self.storage:
            left = Seconds(max(0.0, self.limits.storage - self._waited))
            return f"restart {self.fruitless} without a new step{later}, for {left} at most"
        return f"restart {self.fruitless} of {self.limits.restarts} without a new step{later}"
