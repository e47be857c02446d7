"""The virtual time: a queue of events, in the order of their time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable

from forerun.reporter import Reporter

START = 1_790_000_000.0  # seconds since 1970


class World:
    """The time and the events of one simulation, and the trace of what has happened."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = START
        self.trace: list[tuple[float, str]] = []
        self.faults: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.calls, self.called_at = 0, START  # of processes at one moment
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an event. Events of the same time happen in the order in which they were scheduled."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run_until(self, end: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Process all events up to a time.

        An event may call this itself, for a process that is suspended in the middle of an action.
        """
        while self._events and self._events[0][0] <= end and not is_over():
            time, _, action = heapq.heappop(self._events)
            self.now = max(self.now, time)
            action()
        if not is_over():
            self.now = max(self.now, end)

    def fault(self, kind: str, text: str = "") -> None:
        """Count a fault, and add it to the trace unless `text` is empty."""
        self.faults[kind] += 1
        if text:
            self.note(text)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append((self.now - START, text))


class TraceReporter(Reporter):
    """Writes the lines of a process to the trace."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def info(self, text: str) -> None:
        self._world.note(f"{self._name}: {text}")
