"""The scheduled program played through: one TensorCore in program order, and queues for what runs beside it.

Asynchronous operations start on their queue (ICI, host in and out, DMA between HBM and VMEM, sparse core) and
cost only what is left of them when the core comes to their `-done`. Not modelled: queues fighting for HBM,
several slices over DCN, power; a sparse core is taken to be as fast as HBM lets it be.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from forerun.plan.attention_cost import kernel_seconds, kernel_shape
from forerun.plan.hlo import Computation, Instruction, Module
from forerun.plan.loops import Loops
from forerun.plan.machine import Machine
from forerun.plan.traffic import COLLECTIVES, collective_seconds, copy_queue_and_seconds, goes_back, is_collective
from forerun.plan.work import Work

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
FREE |= {"opt-barrier", "add-dependency"}
KERNEL = "tpu_custom_call"
FREE_TARGETS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"}
FREE_TARGETS |= {"PrepareAsyncCallStart", "PrepareAsyncCallDone"}
QUEUES_THAT_LIMIT = ("ici", "from host", "to host")


Tally = defaultdict[str, float]


@dataclass
class Spent:
    """Seconds of one computation: in all, by what the core did or waited for, and how busy each queue was."""

    seconds: float = 0.0
    by_kind: Tally = field(default_factory=lambda: defaultdict(float))
    busy: Tally = field(default_factory=lambda: defaultdict(float))
    flops: Tally = field(default_factory=lambda: defaultdict(float))

    def add(self, kind: str, seconds: float) -> None:
        self.seconds += seconds
        self.by_kind[kind] += seconds

    def take(self, other: Spent, times: int = 1) -> None:
        self.seconds += times * other.seconds
        for mine, theirs in ((self.by_kind, other.by_kind), (self.busy, other.busy), (self.flops, other.flops)):
            for key, value in theirs.items():
                mine[key] += times * value


class Simulation:
    def __init__(self, module: Module, machine: Machine, chip: str) -> None:
        self.module, self.machine, self.chip = module, machine, chip
        self._work, self._loops = Work(module), Loops(module)
        self._done: dict[str, Spent] = {}

    @property
    def guessed_loops(self) -> list[str]:
        """The loops whose number of iterations could not be derived from the program."""
        return self._loops.guessed

    def run(self) -> Spent:
        return self._computation(self.module.entry)

    def _computation(self, name: str) -> Spent:
        if name not in self._done:
            self._done[name] = _Run(self, self.module.computations[name]).play()
        return self._done[name]


class _Run:
    """One computation played once."""

    def __init__(self, simulation: Simulation, computation: Computation) -> None:
        self.sim, self.computation = simulation, computation
        self.spent = Spent()
        self.free_at: Tally = defaultdict(float)
        self.ends: dict[str, tuple[float, str]] = {}
        self.prepared: dict[str, tuple[str, float]] = {}

    def play(self) -> Spent:
        for x in self.computation.instructions:
            self._instruction(x)
        return self.spent

    def _instruction(self, x: Instruction) -> None:
        if x.op in FREE:
            return
        if x.op == "while":
            self._while(x)
        elif x.op == "call":
            self.spent.take(self.sim._computation(x.attribute("to_apply") or ""))
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
        trips = self.sim._loops.trips(self.computation, x)
        body = self.sim._computation(x.attribute("body") or "")
        self.spent.take(body, trips)
        slowest = max(QUEUES_THAT_LIMIT, key=lambda queue: body.busy[queue])
        if body.busy[slowest] > body.seconds:  # a queue that is never idle sets the pace
            self.spent.add(_waiting_for(slowest), trips * (body.busy[slowest] - body.seconds))

    def _conditional(self, x: Instruction) -> None:
        names = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-<>]+)", x.attributes)
        if found := re.search(r"branch_computations=\{([^}]*)\}", x.attributes):
            names += re.findall(r"%?([\w.\-<>]+)", found[1])
        self.spent.take(max((self.sim._computation(name) for name in names), key=lambda spent: spent.seconds))

    def _launch(self, key: str, queue: str, seconds: float) -> None:
        begins = max(self.spent.seconds, self.free_at[queue])
        self.free_at[queue] = begins + seconds
        self.ends[key] = (begins + seconds, queue)
        self.spent.busy[queue] += seconds

    def _wait(self, key: str) -> None:
        end, queue = self.ends.get(key, (0.0, "dma"))
        if end > self.spent.seconds:
            self.spent.add(_waiting_for(queue), end - self.spent.seconds)

    def _start(self, x: Instruction) -> None:
        queue, seconds = self._task(x)
        if x.op == "async-start" and not x.operands:
            self.prepared[x.name] = queue, seconds  # what it works on comes with an async-update
            return
        self._launch(x.name, queue, seconds)
        if x.op == "collective-permute-start":
            self.spent.busy["ici"] += seconds / 2

    def _task(self, x: Instruction) -> tuple[str, float]:
        """Where an asynchronous operation runs, and how long by itself."""
        machine, module = self.sim.machine, self.sim.module
        if is_collective(x):
            seconds = collective_seconds(machine, self.computation, x)
            if x.op != "collective-permute-start":
                return "ici", seconds
            return ("ici back" if goes_back(x) else "ici forth"), seconds  # one direction of one ring
        called = _called(module, x) if x.op == "async-start" else None
        if called and (collective := _collective_in(called)):
            return "ici", collective_seconds(machine, called, collective)
        if called and "execution_thread" in x.attributes:
            return "sparse core", self.sim._computation(called.name).seconds
        return copy_queue_and_seconds(machine, module, x)

    def _finish(self, x: Instruction) -> None:
        key = x.operands[0] if x.operands else ""
        if key in self.prepared:
            self._launch(x.name, *self.prepared.pop(key))
        elif key in self.ends and x.op.endswith("-update"):
            self.ends[x.name] = self.ends[key]
        elif key in self.ends:
            self._wait(key)

    def _blocking(self, seconds: float) -> None:
        waited = max(0.0, self.free_at["ici"] - self.spent.seconds)
        self.spent.add("collectives", waited + seconds)
        self.free_at["ici"] = self.spent.seconds
        self.spent.busy["ici"] += seconds

    def _collective_fusion(self, x: Instruction) -> bool:
        """Collectives inside fusions: begun by one, awaited by another, or carried out in place."""
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
        if collective is None or "async_collective_fusion_config" in collective.attributes:
            return False
        seconds = collective_seconds(self.sim.machine, inner, collective)
        scattered = collective.op == "all-reduce" and any(y.op == "dynamic-slice" for y in inner.instructions)
        self._blocking(seconds / 2 if scattered else seconds)
        return True

    def _on_core(self, x: Instruction) -> None:
        machine = self.sim.machine
        if x.op == "custom-call":
            self._kernel(x)
            return
        if x.op != "fusion" and not self._touches_arrays(x):
            return  # scalar unit
        flops = self.sim._work.flops(self.computation, x)
        touched = self.sim._work.hbm_bytes(self.computation, x)
        computing = flops / (machine.matmul_flops * machine.matmul_share)
        moving = touched / machine.hbm_bytes_per_second
        kind = "matmul" if flops and computing >= moving else "memory"
        self.spent.add(kind, max(computing, moving) + machine.op_seconds)
        self.spent.flops["matmul"] += flops

    def _touches_arrays(self, x: Instruction) -> bool:
        operands = (self.computation.by_name.get(name) for name in x.operands)
        return any(shape.dims for y in (x, *operands) if y is not None for shape in y.shapes)

    def _kernel(self, x: Instruction) -> None:
        target = _target(x)
        if target in FREE_TARGETS:
            return
        shape = kernel_shape(self.computation, x) if target == KERNEL else None
        if shape is None:
            touched = self.sim._work.hbm_bytes(self.computation, x)
            kind = "kernels" if target == KERNEL else "memory"
            self.spent.add(kind, touched / self.sim.machine.hbm_bytes_per_second)
            return
        self.spent.add("attention", kernel_seconds(self.sim.machine, self.sim.chip, shape))
        self.spent.flops["attention"] += shape.flops


def _target(x: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', x.attributes)
    return found[1] if found else ""


def _waiting_for(queue: str) -> str:
    return "collectives" if queue.startswith("ici") else "host" if "host" in queue else "dma"


def _called(module: Module, x: Instruction) -> Computation | None:
    """What an asynchronous operation carries out; for the sparse core it is wrapped in a call."""
    inner = module.computations.get(x.attribute("calls") or "")
    while inner is not None and inner.root.op == "call":
        inner = module.computations.get(inner.root.attribute("to_apply") or "")
    return inner


def _collective_in(computation: Computation) -> Instruction | None:
    return next((x for x in computation.instructions if is_collective(x)), None)
