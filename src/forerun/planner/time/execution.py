"""Execution of a scheduled program: one stream in program order, and queues for asynchronous operations.

This module has the parts that the simulations of TPUs and GPUs share: the clock, the queues, loops and calls. Each
simulation adds the time of its instructions.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

from forerun.planner.hlo import Computation, Instruction, Module
from forerun.planner.time.transfers import is_collective, payload_bytes
from forerun.planner.time.trip_counts import Loops

# Operations that take no time: they only name, group or order values.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
FREE |= {"opt-barrier", "add-dependency"}

Tally = defaultdict[str, float]
CORE = "core"


@dataclass(frozen=True, slots=True)
class Activity:
    """One entry of the timeline of a computation. Times count from the start of the computation."""

    lane: str  # CORE, or the name of a queue such as "ici"
    start_seconds: float
    seconds: float
    instruction: Instruction
    kind: str = ""  # what the core did or waited for; empty on a queue and for a call
    flops: float = 0.0
    size_bytes: float = 0.0  # on the core: bytes of HBM that it reads and writes; on a queue: bytes of the operands
    overhead_seconds: float = 0.0  # fixed part of `seconds`
    called: str = ""  # the computation that runs inside, `trips` times
    trips: int = 1

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


@dataclass
class Spent:
    """The simulated time of one computation."""

    seconds: float = 0.0
    by_kind: Tally = field(default_factory=lambda: defaultdict(float))  # by what the core did or waited for
    busy: Tally = field(default_factory=lambda: defaultdict(float))  # seconds of work on each queue
    flops: Tally = field(default_factory=lambda: defaultdict(float))  # of matmuls and of attention kernels

    def add(self, kind: str, seconds: float) -> None:
        """Let the core work or wait for `seconds`."""
        self.seconds += seconds
        self.by_kind[kind] += seconds

    def take(self, other: Spent, times: int = 1) -> None:
        """Add the time of another computation, which runs `times` times."""
        self.seconds += times * other.seconds
        for mine, theirs in ((self.by_kind, other.by_kind), (self.busy, other.busy), (self.flops, other.flops)):
            for key, value in theirs.items():
                mine[key] += times * value


class ProgramSimulation(ABC):
    """A simulation of one scheduled module on one device."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.loops = Loops(module)
        # Loops over layers and micro-batches run the same body many times. So each computation is simulated only once,
        # and its result is multiplied by the trip count.
        self._done: dict[str, Spent] = {}
        self._activities: dict[str, list[Activity]] = {}

    @property
    def guessed_loops(self) -> list[str]:
        """The loops whose number of iterations could not be derived from the program."""
        return self.loops.guessed

    def run(self) -> Spent:
        """Return the time of the complete program."""
        return self.spent_in(self.module.entry)

    def spent_in(self, name: str) -> Spent:
        """Return the time of one execution of a computation."""
        if name not in self._done:
            run = self.run_of(self.module.computations[name])
            self._done[name] = run.play()
            self._activities[name] = run.activities
        return self._done[name]

    def forget(self) -> None:
        """Discard the results, so that the next run simulates the program again."""
        self._done, self._activities = {}, {}

    def activities(self, name: str) -> list[Activity]:
        """Return what the device does during one execution of a computation, after `run`."""
        return self._activities[name]

    @abstractmethod
    def run_of(self, computation: Computation) -> ComputationRun:
        """Return a new execution of a computation."""


class ComputationRun(ABC):
    """One execution of one computation. Its clock is `spent.seconds`, and all queues are empty at its start."""

    queues_that_limit: ClassVar[tuple[str, ...]] = ()  # these can set the pace of a loop: see run_loop

    def __init__(self, simulation: ProgramSimulation, computation: Computation) -> None:
        self.simulation, self.computation = simulation, computation
        self.spent = Spent()
        self.activities: list[Activity] = []
        self.current = computation.instructions[0]
        self.free_at: Tally = defaultdict(float)  # queue -> time at which its last operation ends
        self.ends: dict[str, tuple[float, str]] = {}  # asynchronous operation -> (time at which it ends, its queue)

    def play(self) -> Spent:
        """Execute all instructions in program order.

        The compiler has already chosen this order, and the core follows it. So no scheduling is needed here.
        """
        for x in self.computation.instructions:
            self.current = x
            self.instruction(x)
        return self.spent

    def instruction(self, x: Instruction) -> None:
        """Execute one instruction: advance the clock, put work on a queue, or both."""
        if x.op in FREE:
            return
        if x.op == "while":
            self.run_loop(x)
        elif x.op == "call":
            self.call(x.attribute("to_apply") or "")
        elif x.op == "conditional":
            self.run_conditional(x)
        elif x.op.endswith("-start"):
            self.start(x)
        elif x.op.endswith(("-done", "-update")):
            self.finish(x)
        else:
            self.synchronous(x)

    @abstractmethod
    def start(self, x: Instruction) -> None:
        """Put an asynchronous operation on its queue."""

    @abstractmethod
    def finish(self, x: Instruction) -> None:
        """Handle an `-update` or `-done` of an asynchronous operation."""

    @abstractmethod
    def synchronous(self, x: Instruction) -> None:
        """Execute an instruction that the next one waits for."""

    @abstractmethod
    def waiting_for(self, queue: str) -> str:
        """Return the kind of time that waiting for a queue counts as."""

    def advance(
        self, kind: str, seconds: float, *, flops: float = 0.0, size_bytes: float = 0.0, overhead_seconds: float = 0.0
    ) -> None:
        """Let the core work or wait for `seconds`, and record it."""
        self.activities.append(
            Activity(CORE, self.spent.seconds, seconds, self.current, kind, flops, size_bytes, overhead_seconds)
        )
        self.spent.add(kind, seconds)

    def transfer(self, queue: str, begins: float, seconds: float) -> None:
        """Record that the current instruction uses a queue from `begins` on."""
        size_bytes = payload_bytes(self.computation, self.simulation.module, self.current)
        self.spent.busy[queue] += seconds
        self.activities.append(Activity(queue, begins, seconds, self.current, size_bytes=size_bytes))

    def launch(self, key: str, queue: str, seconds: float) -> None:
        """Append an operation to a queue. It begins when the queue is free; the core does not wait."""
        begins = max(self.spent.seconds, self.free_at[queue])
        self.free_at[queue] = begins + seconds
        self.ends[key] = (begins + seconds, queue)
        self.transfer(queue, begins, seconds)

    def wait(self, key: str) -> None:
        """Let the core wait until an operation ends. Only this remainder is not hidden behind other work."""
        end, queue = self.ends.get(key, (0.0, "dma"))
        if end > self.spent.seconds:
            self.advance(self.waiting_for(queue), end - self.spent.seconds)

    def block(self, queue: str, seconds: float) -> None:
        """Let the core carry out a synchronous transfer, after those that already use the queue."""
        waited = max(0.0, self.free_at[queue] - self.spent.seconds)
        self.transfer(queue, self.spent.seconds + waited, seconds)
        self.advance(self.waiting_for(queue), waited + seconds)
        self.free_at[queue] = self.spent.seconds

    def call(self, name: str, trips: int = 1, pause_seconds: float = 0.0, pause: str = "") -> None:
        """Run another computation `trips` times. After each time, the core waits for `pause_seconds`."""
        called = self.simulation.spent_in(name)
        seconds = trips * (called.seconds + pause_seconds)
        kind, begins = pause if pause_seconds else "", self.spent.seconds
        self.activities.append(Activity(CORE, begins, seconds, self.current, kind, called=name, trips=trips))
        self.spent.take(called, trips)
        if pause_seconds:
            self.spent.add(pause, trips * pause_seconds)

    def run_loop(self, x: Instruction) -> None:
        """Run a loop: its body times its trip count, but no faster than its busiest queue."""
        trips = self.simulation.loops.trips(self.computation, x)
        name = x.attribute("body") or ""
        body = self.simulation.spent_in(name)
        # The body was simulated with empty queues. In the real loop, an operation that an iteration leaves on a queue
        # delays the next one. If a queue has more work per iteration than the core, the queue sets the pace.
        slowest = max(self.queues_that_limit, key=lambda queue: body.busy[queue])
        self.call(name, trips, max(0.0, body.busy[slowest] - body.seconds), self.waiting_for(slowest))

    def run_conditional(self, x: Instruction) -> None:
        """Run the slowest branch of a conditional, because the choice depends on data."""
        names = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-<>]+)", x.attributes)
        if found := re.search(r"branch_computations=\{([^}]*)\}", x.attributes):
            names += re.findall(r"%?([\w.\-<>]+)", found[1])
        self.call(max(names, key=lambda name: self.simulation.spent_in(name).seconds))

    def touches_arrays(self, x: Instruction) -> bool:
        """Return whether the result or an operand is an array and not a scalar."""
        operands = (self.computation.by_name.get(name) for name in x.operands)
        return any(shape.dims for y in (x, *operands) if y is not None for shape in y.shapes)


def target_of(x: Instruction) -> str:
    """Return the target of a custom call, or an empty string."""
    found = re.search(r'custom_call_target="([^"]*)"', x.attributes)
    return found[1] if found else ""


def called_by(module: Module, x: Instruction) -> Computation | None:
    """Return the computation that an asynchronous operation runs. It may be wrapped in calls."""
    inner = module.computations.get(x.attribute("calls") or x.attribute("to_apply") or "")
    while inner is not None and inner.root.op == "call":
        inner = module.computations.get(inner.root.attribute("to_apply") or "")
    return inner


def collective_in(computation: Computation) -> Instruction | None:
    """Return the first collective of a computation, or None."""
    return next((x for x in computation.instructions if is_collective(x)), None)
