"""The restart policy: whether another attempt follows, and after which delay."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.exit_codes import ENDED
from forerun.supervise.protocol.ending import Ending
from forerun.supervise.protocol.limits import Limits
from forerun.units import Seconds


@dataclass(frozen=True)
class RestartPolicy:
    """The attempts at a job so far. `fruitless` counts the last ones that did not get beyond step `best`.

    A failing disk or bucket (`storage`) may recover, so it has a limit in seconds instead of a number of attempts.
    `now` is the time of a monotonic clock.
    """

    limits: Limits
    best: int = 0
    fruitless: int = 0
    storage: bool = False
    incidents: tuple[str, ...] = ()  # why the last attempts failed
    since: float = 0.0  # when the best step was reached
    waited: float = 0.0  # seconds from `since` to the end of the last attempt

    def advance(self, reached: int, now: float) -> RestartPolicy:
        """Return the count after an attempt that reached a step and did not fail."""
        return replace(self, best=reached, fruitless=0, since=now, incidents=()) if reached > self.best else self

    def cut_short(self, why: str, reached: int, now: float, *, storage: bool = False) -> RestartPolicy:
        """Return the count after an attempt that failed at step `reached`."""
        tries = self.advance(reached, now)
        return replace(
            tries,
            fruitless=tries.fruitless + 1,
            storage=storage,
            waited=now - tries.since,
            incidents=(*tries.incidents, why)[-self.limits.restarts - 1 :],
        )

    def ending(self) -> Ending | None:
        """Return the end of the job if no other attempt follows, else None."""
        if self.fruitless <= self.limits.restarts or (self.storage and self.waited < self.limits.storage):
            return None
        listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.incidents, 1))
        last = "" if len(self.incidents) == self.fruitless else ", the last of them:"
        return Ending(ENDED, f"given up: {self.fruitless} attempts did not get beyond step {self.best}{last}\n{listed}")

    def delay_seconds(self) -> float:
        """Return the delay before the next attempt. It grows, because the cause may persist for a while."""
        return self.limits.restart_delay_seconds(self.fruitless + self.storage)

    def spoken(self) -> str:
        """Return the text that announces the next attempt."""
        delay = self.delay_seconds()
        later = f", in {Seconds(delay)}" if delay else ""
        if self.fruitless == 1:
            return f"restarting{later}"
        if self.storage:
            left = Seconds(max(0.0, self.limits.storage - self.waited))
            return f"restart {self.fruitless} without a new step{later}, for {left} at most"
        return f"restart {self.fruitless} of {self.limits.restarts} without a new step{later}"
