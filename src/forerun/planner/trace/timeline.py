"""The timeline of a simulated step: the activities of all computations, with loops unrolled.

The simulation runs the body of a loop once and multiplies its time. Here each iteration gets its place. Iterations
beyond a limit are collapsed into one span, so that the number of spans stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from forerun.planner.time.activity import CORE, Activity
from forerun.planner.time.execution import ProgramSimulation

MAX_SPANS = 60_000


@dataclass(frozen=True, slots=True)
class Span:
    """One span of the timeline.

    On the core, leaves cover the step without gaps or overlaps. Other spans are calls, loops and iterations. Their
    contents follow them, with a larger depth.
    """

    lane: str
    name: str
    start_seconds: float
    end_seconds: float
    depth: int
    is_leaf: bool
    activity: Activity | None = None
    iterations: int = 0  # of a collapsed part of a loop

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """All spans of a step. `shown_iterations` is None if all iterations of all loops have spans."""

    spans: tuple[Span, ...]
    seconds: float
    shown_iterations: int | None


def timeline_of(simulation: ProgramSimulation, max_spans: int = MAX_SPANS) -> Timeline:
    """Simulate a program and return its timeline.

    Args:
        simulation: The program and the chip.
        max_spans: The limit of spans. If the unrolled loops have more, each loop shows only its first iterations, but
            at least one.
    """
    seconds = simulation.run().seconds
    shown = _shown_iterations(simulation, max_spans)
    spans = tuple(_Unrolled(simulation, shown).spans(simulation.module.entry, 0.0, 0))
    collapses = any(span.iterations for span in spans)
    return Timeline(spans, seconds, shown if collapses else None)


def _shown_iterations(simulation: ProgramSimulation, max_spans: int) -> int:
    """Return the largest number of iterations per loop with which the timeline has at most `max_spans` spans."""
    longest = max((one.trips for one in _activities(simulation, simulation.module.entry, set())), default=1)
    least, most = 1, max(1, longest)
    while least < most:
        middle = (least + most + 1) // 2
        if _count(simulation, middle) <= max_spans:
            least = middle
        else:
            most = middle - 1
    return least


def _activities(simulation: ProgramSimulation, name: str, seen: set[str]) -> Iterator[Activity]:
    """Yield the activities of a computation and of those that it calls, each computation once."""
    if name in seen:
        return
    seen.add(name)
    for activity in simulation.activities(name):
        yield activity
        if activity.called:
            yield from _activities(simulation, activity.called, seen)


def _count(simulation: ProgramSimulation, shown: int) -> int:
    """Return the number of spans if each loop shows `shown` iterations. An upper bound: it counts empty spans too."""

    @cache
    def count(name: str) -> int:
        total = 0
        for activity in simulation.activities(name):
            total += 1
            if activity.called:
                total += min(activity.trips, shown) * (count(activity.called) + 2) + 1
        return total

    return count(simulation.module.entry)


class _Unrolled:
    """The spans of a simulation with `shown` iterations of each loop."""

    def __init__(self, simulation: ProgramSimulation, shown: int) -> None:
        self.simulation, self.shown = simulation, shown

    def spans(self, name: str, at: float, depth: int) -> Iterator[Span]:
        """Yield the spans of one execution of a computation that starts at the time `at`."""
        for activity in self.simulation.activities(name):
            if not activity.seconds:
                continue
            start, end = at + activity.start_seconds, at + activity.end_seconds
            yield Span(activity.lane, activity.instruction.name, start, end, depth, not activity.called, activity)
            if activity.called:
                yield from self._iterations(activity, start, end, depth + 1)

    def _iterations(self, activity: Activity, start: float, end: float, depth: int) -> Iterator[Span]:
        """Yield the spans inside a call or a loop, which lasts from `start` to `end`."""
        trips, name = activity.trips, activity.instruction.name
        period, shown = (end - start) / trips, min(trips, self.shown)
        body_seconds = self.simulation.spent_in(activity.called).seconds
        for number in range(shown):
            # Multiply instead of adding up: the rounding errors of many iterations must not accumulate.
            begins = start + number * period
            ends = end if number + 1 == trips else start + (number + 1) * period
            inner = depth
            if trips > 1:
                yield Span(CORE, f"{name}: iteration {number + 1} of {trips}", begins, ends, depth, False)
                inner += 1
            yield from self.spans(activity.called, begins, inner)
            if activity.kind:
                text = f"{name}: wait for a queue"
                yield Span(CORE, text, begins + body_seconds, ends, inner, True, activity)
        if trips > shown:
            text = f"{name}: iterations {shown + 1} to {trips}, collapsed"
            yield Span(CORE, text, start + shown * period, end, depth, True, activity, trips - shown)
