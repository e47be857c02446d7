"""The timeline of a simulated step, and its file: trace events in JSON, as the JAX profiler writes them.

The simulation runs the body of a loop once and multiplies its time. In the timeline, each iteration gets its place.
Iterations beyond a limit are collapsed into one span, so that the number of spans stays bounded.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Processes and threads have
the names of a profile of a TPU or GPU, and so have the arguments of operations.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from forerun.errors import UserError
from forerun.hardware.slices import Slice
from forerun.planner.hlo import Module
from forerun.planner.time.execution import CORE, Activity, ProgramSimulation
from forerun.planner.time.prediction import WORDS, simulation_of
from forerun.planner.time.step_time import LIMITS, StepTime

MAX_SPANS = 60_000
FUSIONS = {"kLoop": "loop fusion", "kOutput": "output fusion", "kInput": "input fusion", "kCustom": "custom fusion"}
LONGEST_SHAPE = 200
DEVICE = 1  # process id
STEPS, MODULES, OPERATIONS = 1, 2, 3  # thread ids; those of the queues follow
QUEUES = {
    "ici": "ICI collectives",
    "ici forth": "ICI permutes, forward",
    "ici back": "ICI permutes, backward",
    "from host": "Transfers from host",
    "to host": "Transfers to host",
    "dma": "DMA between HBM and VMEM",
    "sparse core": "SparseCore",
    "links": "NCCL within the machine",
    "network": "NCCL between machines",
}
ADDED = "added to reach the peak rates of the chip"

Event = dict[str, Any]


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


@dataclass(frozen=True)
class SimulatedStep:
    """A program, the slice that runs it, and the predicted step time. `facts` are shown with the trace."""

    module: Module
    slice: Slice
    step: StepTime
    facts: Mapping[str, Any] = field(default_factory=dict)


def trace_content(simulated: SimulatedStep, max_spans: int = MAX_SPANS) -> dict[str, Any]:
    """Return the trace of a simulated step as a JSON object."""
    chip = simulated.slice.chip
    timeline = timeline_of(simulation_of(simulated.module, simulated.slice), max_spans)
    written = _Events(simulated, timeline)
    metadata = {
        "highres-ticks": True,
        "simulated": True,
        "about": "Simulated by forerun plan from the compiled program and a cost model. Nothing was measured.",
        "chip": chip.name,
        "step_seconds": simulated.step.mid_seconds,
        "step_seconds_low": simulated.step.low_seconds,
        "step_seconds_high": simulated.step.high_seconds,
        "bounds_seconds": dict(simulated.step.parts_seconds),
        "doubts": list(simulated.step.doubts),
        "loop_iterations_shown": timeline.shown_iterations or "all",
        **simulated.facts,
    }
    events = list(written.all())
    return {"displayTimeUnit": "ns", "metadata": metadata, "traceEvents": events}


def encoded(content: Mapping[str, Any], *, compress: bool) -> bytes:
    """Return the bytes of a trace file."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True).encode()
    # The time of compression is no part of the file: the same plan writes the same bytes.
    return gzip.compress(text, compresslevel=6, mtime=0) if compress else text


class _Events:
    """The events of a timeline. Times are rounded to nanoseconds, the resolution of Perfetto."""

    def __init__(self, simulated: SimulatedStep, timeline: Timeline) -> None:
        self.simulated, self.timeline = simulated, timeline
        self.step = simulated.step
        # A calibration by the user's runs scales the complete step. A step that was simulated faster than the peak
        # rates of the chip is as long as its floor instead, see `step_time`.
        self.scale = self.step.mid_seconds / max(timeline.seconds, self.step.floor_seconds)
        self.step_ns = round(self.step.mid_seconds * 1e9)

    def all(self) -> Iterator[Event]:
        """Yield the names of the lanes, then the events of all lanes."""
        operations = list(self._operations())
        queues = self._queues()
        yield from self._names([name for name, _ in queues])
        about = {"simulated": True, "step_seconds": self.step.mid_seconds, "bound_by": self.step.limit}
        yield _event(STEPS, "1 (simulated)", 0, self.step_ns, {"step_num": "1", "group_id": 1, **about})
        yield _event(MODULES, "jit_step (simulated)", 0, self.step_ns, {"program": "jit_step", **about})
        yield from operations
        for number, (_, events) in enumerate(queues, start=OPERATIONS + 1):
            yield from ({**event, "tid": number} for event in events)

    def _names(self, queues: Sequence[str]) -> Iterator[Event]:
        chip = self.simulated.slice.chip
        yield _meta("process_name", 0, name=f"/device:{chip.platform.upper()}:0 (simulated {chip.name})")
        yield _meta("process_labels", 0, labels="simulated, not measured")
        yield _meta("process_sort_index", 0, sort_index=DEVICE)
        threads = {STEPS: "Steps", MODULES: "XLA Modules", OPERATIONS: "XLA Ops"}
        threads |= dict(enumerate(queues, start=OPERATIONS + 1))
        for number, name in threads.items():
            yield _meta("thread_name", number, name=name)
            yield _meta("thread_sort_index", number, sort_index=number)

    def _nanoseconds(self, seconds: float) -> int:
        return round(seconds * self.scale * 1e9)

    def _operations(self) -> Iterator[Event]:
        """Yield the events of the core.

        Each leaf begins where the one before it ends, and a loop ends with its last leaf. So rounding makes neither
        gaps nor overlaps, and the leaves add up to the step.
        """
        now = 0
        open_spans: list[tuple[int, Event]] = []  # calls and loops: (depth, event)

        def close(depth: int) -> None:
            while open_spans and open_spans[-1][0] >= depth:
                event = open_spans.pop()[1]
                event["dur"] = _microseconds(now - round(event["ts"] * 1000))

        events: list[Event] = []
        for span in self.timeline.spans:
            if span.lane != CORE:
                continue
            close(span.depth)
            end = max(now, self._nanoseconds(span.end_seconds)) if span.is_leaf else now
            event = _event(OPERATIONS, span.name, now, end, self._arguments(span))
            events.append(event)
            if span.is_leaf:
                now = end
            else:
                open_spans.append((span.depth, event))
        close(0)
        if now < self.step_ns:
            added = {"hlo_category": ADDED, "bound_by": self.step.limit}
            events.append(_event(OPERATIONS, ADDED, now, self.step_ns, added))
        yield from events

    def _queues(self) -> list[tuple[str, list[Event]]]:
        """Return the lanes of the queues. A queue has a second lane for transfers that overlap those of the first.

        They overlap if an iteration of a loop leaves a transfer in flight: the simulation of a body starts with empty
        queues.
        """
        by_queue: dict[str, list[Span]] = defaultdict(list)
        for span in self.timeline.spans:
            if span.lane != CORE:
                by_queue[span.lane].append(span)
        lanes: list[tuple[str, list[Event]]] = []
        for queue in sorted(by_queue, key=list(QUEUES).index):
            rows: list[list[Event]] = []
            free_from: list[int] = []  # the end of the last event of each row
            for span in sorted(by_queue[queue], key=lambda span: span.start_seconds):
                start, end = self._nanoseconds(span.start_seconds), self._nanoseconds(span.end_seconds)
                event = _event(0, span.name, start, end, self._arguments(span))
                number = next((n for n, free in enumerate(free_from) if free <= start), len(rows))
                if number == len(rows):
                    rows.append([])
                    free_from.append(0)
                rows[number].append(event)
                free_from[number] = end
            lanes += [(QUEUES[queue] + (f" ({n})" if n > 1 else ""), events) for n, events in enumerate(rows, start=1)]
        return lanes

    def _arguments(self, span: Span) -> dict[str, Any]:
        activity = span.activity
        if activity is None:
            return {"hlo_category": "loop iteration"}
        if span.iterations:
            return {"hlo_category": "collapsed iterations", "iterations": span.iterations}
        found = arguments_of(self.simulated.module, activity, is_transfer=span.lane != CORE)
        return {"hlo_category": category_of(activity), "bound_by": self._bound(activity), **found}

    def _bound(self, activity: Activity) -> str:
        """Return what limits an activity: compute, HBM, links, network, host or the fixed overhead of an operation."""
        if activity.lane != CORE:
            lane = activity.lane
            if lane == "links" or lane.startswith("ici"):
                return self.step.links
            return "host" if "host" in lane else "network" if lane == "network" else "HBM"
        if not activity.kind:
            return ""
        if activity.overhead_seconds > activity.seconds / 2:
            return "overhead"
        part = WORDS[activity.kind]
        return self.step.links if part == "collectives not hidden" else LIMITS[part]


def _event(thread: int, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> Event:
    times = {"ts": _microseconds(start_ns), "dur": _microseconds(end_ns - start_ns)}
    shown = {key: value for key, value in args.items() if value not in ("", None)}
    return {"ph": "X", "pid": DEVICE, "tid": thread, "name": name, **times, "args": shown}


def _meta(kind: str, thread: int, **args: Any) -> Event:
    return {"ph": "M", "pid": DEVICE, "tid": thread, "name": kind, "args": args}


def _microseconds(nanoseconds: int) -> float:
    """Return a time in the unit of the format. Perfetto multiplies by 1000 and truncates, which must return it."""
    value = nanoseconds / 1000
    while int(value * 1000) < nanoseconds:
        value = math.nextafter(value, math.inf)
    return value


def category_of(activity: Activity) -> str:
    """Return the category of an operation, in the words of the XLA profiler."""
    x = activity.instruction
    if x.op == "fusion":
        if activity.flops:
            return "convolution fusion"
        found = re.search(r"\bkind=(\w+)", x.attributes)
        return FUSIONS.get(found[1] if found else "", "fusion")
    return x.op


def arguments_of(module: Module, activity: Activity, *, is_transfer: bool) -> dict[str, Any]:
    """Return the arguments of an operation's event. Names are those of the XLA profiler where it has one."""
    x = activity.instruction
    source = module.source(x)
    return {
        "tf_op": x.op_name(),
        "source": f"{_short(source[0])}:{source[1]}" if source else "",
        "flops": round(activity.flops) or None,
        "transferred_bytes" if is_transfer else "bytes_accessed": round(activity.size_bytes) or None,
        "shape": x.shape_text.strip()[:LONGEST_SHAPE],
        "trips": activity.trips if activity.called and activity.trips > 1 else None,
    }


def _short(path: str) -> str:
    """Return a path without the folders of this machine: from `forerun/` on, or the name of the file."""
    _, package, rest = path.rpartition("/forerun/")
    return f"forerun/{rest}" if package else path.rpartition("/")[2]


def require_one_slice(names: Sequence[str], wanted: str | None = None) -> str:
    """Return the slice of a trace: the wanted one, or the only one of `names`.

    Raises:
        UserError: `names` lacks the wanted slice, or none is wanted and there is not exactly one.
    """
    if wanted in names or (wanted is None and len(names) == 1):
        return wanted or names[0]
    planned = f"the plan has {', '.join(names)}" if names else "the plan compares slices of every generation"
    raise UserError(
        "E-PLAN-024",
        "a trace needs one slice" if wanted is None else f"a trace of {wanted} needs a plan of this slice",
        why=f"it shows a step on one device of one slice; {planned}",
        fix=f"name one slice: --on {wanted or (names[0] if names else 'v6e-8')}",
    )
