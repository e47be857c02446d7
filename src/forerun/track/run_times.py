"""The clock of a run: which category each second belongs to, and the events that record it.

A process is always in one category (`forerun.track.goodput`). The main thread switches it, so the seconds of a session
add up to its age without a measurement of the remainder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.reporter import SILENT, Reporter
from forerun.track.event_log import EventLog, read_events
from forerun.track.goodput import CATEGORIES, OTHER, USEFUL, Goodput, goodput_of, shares_of

# `time` lines are at most this far apart, and denser at first: a short run that is killed has a history too.
LONGEST_SECONDS = 5.0
SHORTEST_SECONDS = 0.1
DENSITY = 50  # lines in the first seconds of steps: the distance is their age divided by this number

_OF_PHASE = {"data": "startup", "compile": "compile", "restore": "restore", "steps": USEFUL}


class RunTimes:
    """Accounts for the time of this process and writes the events of the run. Main thread only.

    Until `open` is called, events are kept in memory. A host that writes no files never calls it.

    Args:
      began_unix_seconds: when the session began, for example the start of the process. Default: now.
      clock: measures durations.
      unix: the time of day.
      about: further values of the `start` event.
    """

    def __init__(
        self,
        began_unix_seconds: float | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        unix: Callable[[], float] = time.time,
        **about: Any,
    ) -> None:
        self._clock, self._unix = clock, unix
        now = unix()
        self._began = now if began_unix_seconds is None else min(began_unix_seconds, now)
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._seconds["startup"] = now - self._began
        self._category, self._since = "startup", clock()
        self._earlier: dict[str, float] = {}
        self._useful_before = self._waited_seconds = 0.0  # at the last finished step
        self._steps_began = self._marked = self._since
        self._in_steps = False
        self._pending: list[dict[str, Any]] = []
        self.log: EventLog | None = None
        self._step = 0
        self._start = {"unix_seconds": round(self._began, 6), "event": "start", **about}
        self._pending.append(self._start)

    def describe(self, **about: Any) -> None:
        """Add values to the `start` event, before `open`."""
        self._start.update(about)

    def open(self, path: Path, reporter: Reporter = SILENT) -> None:
        """Open events.jsonl and write the events so far."""
        self.log = EventLog(path, reporter)
        for event in self._pending:
            self.log.write(event | {"session": self.log.session})
        self._pending = []

    def event(self, name: str, /, **values: Any) -> None:
        """Write an event."""
        made = {"unix_seconds": round(self._unix(), 6), "event": name, **values}
        if self.log is not None:
            self.log.write(made | {"session": self.log.session})
        elif not self._in_steps:
            self._pending.append(made)

    def phase(self, name: str) -> None:
        """Begin a phase: data, compile, restore, steps or finish."""
        self._switch(_OF_PHASE.get(name, OTHER))
        if name == "steps":
            self._in_steps, self._steps_began = True, self._since
        self.event("phase", name=name)

    def resume(self, step: int) -> None:
        """Record the step that this session starts from. The useful time of earlier sessions after it is lost."""
        log = self.log
        if log is None:
            return
        resumed = {"unix_seconds": self._start["unix_seconds"], "event": "resume", "step": step}
        before = goodput_of([*log.earlier, self._start, resumed])
        self._earlier = {} if before is None else before.seconds
        log.earlier = []
        self._step = step
        if step or log.session > 1:
            self.event("resume", step=step)

    @contextmanager
    def spent(self, category: str) -> Iterator[None]:
        """Count the time of the block in this category."""
        before = self._category
        self._switch(category)
        try:
            yield
        finally:
            self._switch(before)

    def finish_step(self, step: int, waited_seconds: float, *, is_useful: bool) -> None:
        """Account for the time since the last finished step.

        Args:
          step: its number.
          waited_seconds: the time for which the run has waited for data so far.
          is_useful: whether the step was taken at its first try.
        """
        self._switch(self._category)
        interval = self._seconds[USEFUL] - self._useful_before
        waited = min(max(0.0, waited_seconds - self._waited_seconds), interval)
        self._move("data_wait", waited)
        if not is_useful:
            self._move(OTHER, interval - waited)
        self._step, self._useful_before, self._waited_seconds = step, self._seconds[USEFUL], waited_seconds

    def shares(self) -> dict[str, float]:
        """Return the shares of the wall time of the run so far, for a row of metrics. Empty without a log."""
        if self.log is None:
            return {}
        self._switch(self._category)
        shares = shares_of({name: self._earlier.get(name, 0.0) + self._seconds[name] for name in CATEGORIES})
        return {name: round(share, 6) for name, share in shares.items()}

    def mark(self, step: int, *, is_forced: bool = False) -> None:
        """Write a `time` event, unless the last one was a short time ago."""
        if self.log is None:
            return
        self._switch(self._category)
        least = min(LONGEST_SECONDS, max(SHORTEST_SECONDS, (self._since - self._steps_began) / DENSITY))
        if is_forced or self._since - self._marked >= least:
            self._marked = self._since
            seconds = {name: round(value, 6) for name, value in self._seconds.items() if value}
            self.event("time", step=step, seconds=seconds)

    def saved(self, step: int, seconds: float) -> None:
        """Record that a save has blocked the steps for `seconds`."""
        self.event("save", step=step, seconds=round(seconds, 6))

    def stop(self, step: int, reason: str) -> None:
        """Record that this session ends before the end of the run."""
        self.mark(step, is_forced=True)
        self.event("stop", step=step, reason=reason)

    def fail(self, error: BaseException) -> None:
        """Record that an error ends this session. Only its code or its type is written: a text may contain a secret."""
        if self.log is not None:
            self.stop(self._step, str(getattr(error, "code", None) or type(error).__name__))

    def end(self, step: int) -> Goodput | None:
        """Record the end of the run, and return its goodput. None if there is no log."""
        self.mark(step, is_forced=True)
        self.event("end", step=step)
        return None if self.log is None else goodput_of(read_events(self.log.path))

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
            self.log = None

    def _switch(self, category: str) -> None:
        now = self._clock()
        self._seconds[self._category] += now - self._since
        self._category, self._since = category, now

    def _move(self, category: str, seconds: float) -> None:
        self._seconds[USEFUL] -= seconds
        self._seconds[category] += seconds
