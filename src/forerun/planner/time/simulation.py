"""Simulation of a scheduled program: one TensorCore in program order, and queues for asynchronous operations.

An asynchronous operation runs on its queue: ICI, to host, from host, DMA between HBM and VMEM, or sparse core. The core
waits only for the part of it that is not finished when it reaches the operation's `-done`.

Not modelled: contention between queues for HBM, several slices over DCN, and power limits. A sparse core is assumed to
be limited only by HBM.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from forerun.planner.hlo import Computation, Instruction, Module
from forerun.planner.time.activity import CORE, Activity
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.splash_cost import kernel_seconds, kernel_shape
from forerun.planner.time.transfers import (
    COLLECTIVES,
    collective_seconds,
    copy_queue_and_seconds,
    goes_back,
    is_collective,
    payload_bytes,
)
from forerun.planner.time.trip_counts import Loops

# Operations that take no time: they only name, group or order values.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
FREE |= {"opt-barrier", "add-dependency"}
KERNEL = "tpu_custom_call"  # the target of Pallas kernels
FREE_TARGETS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"}
FREE_TARGETS |= {"PrepareAsyncCallStart", "PrepareAsyncCallDone"}
QUEUES_THAT_LIMIT = ("ici", "from host", "to host")  # these can set the pace of a loop: see _while


Tally = defaultdict[str, float]


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


class Simulation:
    """A simulation of one scheduled module on one device.

    Args:
        module: The scheduled program.
        machine: The rates and latencies of the device.
        chip: The name of the chip generation, which selects the counted cycles of attention kernels.
    """

    def __init__(self, module: Module, machine: ChipModel, chip: str) -> None:
        self.module, self.machine, self.chip = module, machine, chip
        self._work, self._loops = InstructionWork(module), Loops(module)
        # Loops over layers and micro-batches run the same body many times. So each computation is simulated only once,
        # and its result is multiplied by the trip count.
        self._done: dict[str, Spent] = {}
        self._activities: dict[str, list[Activity]] = {}

    @property
    def guessed_loops(self) -> list[str]:
        """The loops whose number of iterations could not be derived from the program."""
        return self._loops.guessed

    def run(self) -> Spent:
        """Return the time of the complete program."""
        return self.spent_in(self.module.entry)

    def spent_in(self, name: str) -> Spent:
        """Return the time of one execution of a computation."""
        if name not in self._done:
            run = _Run(self, self.module.computations[name])
            self._done[name] = run.play()
            self._activities[name] = run.activities
        return self._done[name]

    def activities(self, name: str) -> list[Activity]:
        """Return what the device does during one execution of a computation, after `run`."""
        return self._activities[name]


class _Run:
    """One execution of one computation. Its clock is `spent.seconds`, and all queues are empty at its start."""

    def __init__(self, simulation: Simulation, computation: Computation) -> None:
        self.sim, self.computation = simulation, computation
        self.spent = Spent()
        self.activities: list[Activity] = []
        self.current = computation.instructions[0]
        self.free_at: Tally = defaultdict(float)  # queue -> time at which its last operation ends
        self.ends: dict[str, tuple[float, str]] = {}  # asynchronous operation -> (time at which it ends, its queue)
        self.prepared: dict[str, tuple[str, float]] = {}  # async-start without operands yet -> (queue, seconds)

    def play(self) -> Spent:
        """Execute all instructions in program order.

        The compiler has already chosen this order, and the core follows it. So no scheduling is needed here.
        """
        for x in self.computation.instructions:
            self.current = x
            self._instruction(x)
        return self.spent

    def _advance(
        self, kind: str, seconds: float, *, flops: float = 0.0, size_bytes: float = 0.0, overhead_seconds: float = 0.0
    ) -> None:
        """Let the core work or wait for `seconds`, and record it."""
        self.activities.append(
            Activity(CORE, self.spent.seconds, seconds, self.current, kind, flops, size_bytes, overhead_seconds)
        )
        self.spent.add(kind, seconds)

    def _transfer(self, queue: str, begins: float, seconds: float) -> None:
        """Record that the current instruction uses a queue from `begins` on."""
        size_bytes = payload_bytes(self.computation, self.sim.module, self.current)
        self.spent.busy[queue] += seconds
        self.activities.append(Activity(queue, begins, seconds, self.current, size_bytes=size_bytes))

    def _call(self, name: str, trips: int = 1, pause_seconds: float = 0.0, pause: str = "") -> None:
        """Run another computation `trips` times. After each time, the core waits for `pause_seconds`."""
        called = self.sim.spent_in(name)
        seconds = trips * (called.seconds + pause_seconds)
        kind, begins = pause if pause_seconds else "", self.spent.seconds
        self.activities.append(Activity(CORE, begins, seconds, self.current, kind, called=name, trips=trips))
        self.spent.take(called, trips)
        if pause_seconds:
            self.spent.add(pause, trips * pause_seconds)

    def _instruction(self, x: Instruction) -> None:
        """Execute one instruction: advance the clock, put work on a queue, or both."""
        if x.op in FREE:
            return
        if x.op == "while":
            self._while(x)
        elif x.op == "call":
            self._call(x.attribute("to_apply") or "")
        elif x.op == "conditional":
            self._conditional(x)
        elif x.op.endswith("-start"):
            self._start(x)
        elif x.op.endswith(("-done", "-update")):
            self._finish(x)
        elif x.op in COLLECTIVES:
            self._blocking(collective_seconds(self.sim.machine, self.computation, x))
        elif x.op != "fusion" or not self._collective_fusion(x):
            self._on_core(x)

    def _while(self, x: Instruction) -> None:
        """Run a loop: its body times its trip count, but no faster than its busiest queue."""
        trips = self.sim._loops.trips(self.computation, x)
        name = x.attribute("body") or ""
        body = self.sim.spent_in(name)
        # The body was simulated with empty queues. In the real loop, an operation that an iteration leaves on a queue
        # delays the next one. If a queue has more work per iteration than the core, the queue sets the pace.
        slowest = max(QUEUES_THAT_LIMIT, key=lambda queue: body.busy[queue])
        self._call(name, trips, max(0.0, body.busy[slowest] - body.seconds), _waiting_for(slowest))

    def _conditional(self, x: Instruction) -> None:
        """Run the slowest branch of a conditional, because the choice depends on data."""
        names = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-<>]+)", x.attributes)
        if found := re.search(r"branch_computations=\{([^}]*)\}", x.attributes):
            names += re.findall(r"%?([\w.\-<>]+)", found[1])
        self._call(max(names, key=lambda name: self.sim.spent_in(name).seconds))

    def _launch(self, key: str, queue: str, seconds: float) -> None:
        """Append an operation to a queue. It begins when the queue is free; the core does not wait."""
        begins = max(self.spent.seconds, self.free_at[queue])
        self.free_at[queue] = begins + seconds
        self.ends[key] = (begins + seconds, queue)
        self._transfer(queue, begins, seconds)

    def _wait(self, key: str) -> None:
        """Let the core wait until an operation ends. Only this remainder is not hidden behind other work."""
        end, queue = self.ends.get(key, (0.0, "dma"))
        if end > self.spent.seconds:
            self._advance(_waiting_for(queue), end - self.spent.seconds)

    def _start(self, x: Instruction) -> None:
        """Put an asynchronous operation on its queue."""
        queue, seconds = self._task(x)
        if x.op == "async-start" and not x.operands:
            self.prepared[x.name] = queue, seconds  # an async-update brings its operands; it begins there
            return
        self._launch(x.name, queue, seconds)
        if x.op == "collective-permute-start":
            # Each direction has its own queue, but QUEUES_THAT_LIMIT knows only "ici". A permute uses one of the two
            # directions, hence half of the link time.
            self.spent.busy["ici"] += seconds / 2

    def _task(self, x: Instruction) -> tuple[str, float]:
        """Return (queue, seconds) of an asynchronous operation; the seconds are without waiting for the queue."""
        machine, module = self.sim.machine, self.sim.module
        if is_collective(x):
            seconds = collective_seconds(machine, self.computation, x)
            if x.op != "collective-permute-start":
                return "ici", seconds
            return ("ici back" if goes_back(x) else "ici forth"), seconds  # one direction of one ring
        called = _called(module, x) if x.op == "async-start" else None
        if called and (collective := _collective_in(called)):
            return "ici", collective_seconds(machine, called, collective)
        if called and "execution_thread" in x.attributes:  # a thread other than the TensorCore's
            return "sparse core", self.sim.spent_in(called.name).seconds
        return copy_queue_and_seconds(machine, module, x)

    def _finish(self, x: Instruction) -> None:
        """Handle an `-update` or `-done`: begin a prepared operation, pass its end time on, or wait for it."""
        key = x.operands[0] if x.operands else ""
        if key in self.prepared:
            self._launch(x.name, *self.prepared.pop(key))
        elif key in self.ends and x.op.endswith("-update"):
            self.ends[x.name] = self.ends[key]
        elif key in self.ends:
            self._wait(key)

    def _blocking(self, seconds: float) -> None:
        """Let the core carry out a synchronous collective, after those that already use the links."""
        waited = max(0.0, self.free_at["ici"] - self.spent.seconds)
        self._transfer("ici", self.spent.seconds + waited, seconds)
        self._advance("collectives", waited + seconds)
        self.free_at["ici"] = self.spent.seconds

    def _collective_fusion(self, x: Instruction) -> bool:
        """Handle a fusion that starts, awaits or carries out a collective. Return False for any other fusion.

        The fusions that start and await the same collective are matched by its channel id.
        """
        inner = self.sim.module.computations.get(x.attribute("calls") or "")
        collective = _collective_in(inner) if inner else None
        if inner is None:
            return False
        role = _target(inner.root)
        channel = re.search(r"channel_id=(\d+)", collective.attributes) if collective else None
        key = f"channel {channel[1]}" if channel else ""
        if role == "AsyncCollectiveStart" and collective:
            self._launch(key, "ici", collective_seconds(self.sim.machine, inner, collective))
            return True
        if role == "AsyncCollectiveDone":
            self._wait(key)
            return True
        # A fusion with this configuration computes while a collective that was started earlier is in flight. Its own
        # time is that of its computation, so it is simulated as work of the core.
        if collective is None or "async_collective_fusion_config" in collective.attributes:
            return False
        seconds = collective_seconds(self.sim.machine, inner, collective)
        # An all-reduce of which each device keeps a slice is a reduce-scatter, which sends half as much.
        scattered = collective.op == "all-reduce" and any(y.op == "dynamic-slice" for y in inner.instructions)
        self._blocking(seconds / 2 if scattered else seconds)
        return True

    def _on_core(self, x: Instruction) -> None:
        """Run a fusion, a kernel or any other synchronous instruction on the core."""
        machine = self.sim.machine
        if x.op == "custom-call":
            self._kernel(x)
            return
        if x.op != "fusion" and not self._touches_arrays(x):
            return  # scalars: the scalar unit computes them beside the vector unit, at no cost
        flops = self.sim._work.flops(self.computation, x)
        touched = self.sim._work.hbm_bytes(self.computation, x)
        computing = flops / (machine.matmul_flops * machine.matmul_share)
        moving = touched / machine.hbm_bytes_per_second
        # A fusion is assumed to overlap its computation with its transfers, so the slower of both counts. Vector
        # arithmetic is not modelled: outside matmuls and attention, HBM is assumed to be the limit.
        kind = "matmul" if flops and computing >= moving else "memory"
        seconds = max(computing, moving) + machine.op_seconds
        self._advance(kind, seconds, flops=flops, size_bytes=touched, overhead_seconds=machine.op_seconds)
        self.spent.flops["matmul"] += flops

    def _touches_arrays(self, x: Instruction) -> bool:
        """Return whether the result or an operand is an array and not a scalar."""
        operands = (self.computation.by_name.get(name) for name in x.operands)
        return any(shape.dims for y in (x, *operands) if y is not None for shape in y.shapes)

    def _kernel(self, x: Instruction) -> None:
        """Run a custom call: a splash attention kernel, an unknown kernel, or a helper of the compiler."""
        target = _target(x)
        if target in FREE_TARGETS:
            return
        shape = kernel_shape(self.computation, x) if target == KERNEL else None
        if shape is None:
            # The cost of an unknown kernel cannot be read from the program: assume that HBM limits it. The kind
            # "kernels" marks the prediction as uncertain.
            touched = self.sim._work.hbm_bytes(self.computation, x)
            kind = "kernels" if target == KERNEL else "memory"
            self._advance(kind, touched / self.sim.machine.hbm_bytes_per_second, size_bytes=touched)
            return
        self._advance("attention", kernel_seconds(self.sim.machine, self.sim.chip, shape), flops=shape.flops)
        self.spent.flops["attention"] += shape.flops


def _target(x: Instruction) -> str:
    """Return the target of a custom call, or an empty string."""
    found = re.search(r'custom_call_target="([^"]*)"', x.attributes)
    return found[1] if found else ""


def _waiting_for(queue: str) -> str:
    """Return the kind of time (a key of `step_time.WORDS`) that waiting for a queue counts as."""
    return "collectives" if queue.startswith("ici") else "host" if "host" in queue else "dma"


def _called(module: Module, x: Instruction) -> Computation | None:
    """Return the computation that an asynchronous operation runs. For the sparse core, calls are wrapped around it."""
    inner = module.computations.get(x.attribute("calls") or "")
    while inner is not None and inner.root.op == "call":
        inner = module.computations.get(inner.root.attribute("to_apply") or "")
    return inner


def _collective_in(computation: Computation) -> Instruction | None:
    """Return the first collective of a computation, or None."""
    return next((x for x in computation.instructions if is_collective(x)), None)
