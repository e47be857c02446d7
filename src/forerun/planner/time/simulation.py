"""Simulation of a scheduled program: one TensorCore in program order, and queues for asynchronous operations.

An asynchronous operation runs on its queue: ICI, DCN, to host, from host, DMA between HBM and VMEM, or sparse core. The
core waits only for the part of it that is not finished when it reaches the operation's `-done`.

The core and the DMA queue share the bandwidth of HBM. While both use it, each gets half.

Not modelled: contention of other queues for HBM, and power limits. A sparse core is assumed to
be limited only by HBM.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from typing import ClassVar

from forerun.planner.hlo import Computation, Instruction, Module
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.collectives.collective_cost import OFFLOADED, CollectiveCost
from forerun.planner.time.collectives.slice_network import QUEUE, SliceNetwork, crosses_slices, rendezvous, sent_bytes
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.execution import ComputationRun, ProgramSimulation, called_by, collective_in, target_of
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.matrix_work import grouped_shape, is_metadata
from forerun.planner.time.splash_cost import kernel_seconds, kernel_shape
from forerun.planner.time.transfers import (
    COLLECTIVES,
    copy_queue_and_seconds,
    goes_back,
    is_collective,
)

HBM_QUEUE = "hbm"  # seconds of HBM bandwidth that the core and its copies use
KERNEL = "tpu_custom_call"  # the target of Pallas kernels
FREE_TARGETS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"}
FREE_TARGETS |= {"PrepareAsyncCallStart", "PrepareAsyncCallDone"}


class Simulation(ProgramSimulation):
    """A simulation of one scheduled module on one device.

    Args:
        module: The scheduled program.
        machine: The rates and latencies of the device.
        chip: The name of the chip generation, which selects the counted cycles of attention kernels.
        torus: The links between the devices. None is a closed ring for each group of a collective.
        network: The network between slices, or None for one slice.
    """

    def __init__(
        self,
        module: Module,
        machine: ChipModel,
        chip: str,
        torus: Torus | None = None,
        network: SliceNetwork | None = None,
    ) -> None:
        super().__init__(module)
        self.network = network
        self.machine, self.chip = machine, chip
        self.collectives = CollectiveCost(module, machine, torus)
        self.work = InstructionWork(module, machine.matrix_unit, machine.division_ops, machine.eight_bit_speed)

    def run_of(self, computation: Computation) -> ComputationRun:
        return _Run(self, computation)

    def on(self, machine: ChipModel) -> Simulation:
        """Return a simulation of the same program on another machine. Both share what does not depend on it."""
        other = copy(self)
        other.machine = machine
        other.collectives = copy(self.collectives)
        other.collectives.machine = machine
        other.forget()
        return other


class _Run(ComputationRun):
    """One execution of one computation on a TPU."""

    queues_that_limit: ClassVar[tuple[str, ...]] = ("ici", QUEUE, "from host", "to host", HBM_QUEUE)

    def __init__(self, simulation: Simulation, computation: Computation) -> None:
        super().__init__(simulation, computation)
        self.sim = simulation
        self.prepared: dict[str, tuple[str, float]] = {}  # async-start without operands yet -> (queue, seconds)

    def waiting_for(self, queue: str) -> str:
        if queue == QUEUE:
            return "network"
        return "collectives" if queue.startswith("ici") else "host" if "host" in queue else "dma"

    def synchronous(self, x: Instruction) -> None:
        if crosses_slices(x) and self.sim.network is not None:
            if x.op == "send":
                seconds = self.sim.network.seconds(x, sent_bytes(self.computation, x))
                self.launch(rendezvous(x), QUEUE, seconds)
        elif x.op in COLLECTIVES:
            self.block("ici", self.sim.collectives.seconds(self.computation, x))
        elif x.op != "fusion" or not self._collective_fusion(x):
            self._on_core(x)

    def start(self, x: Instruction) -> None:
        queue, seconds = self._task(x)
        if x.op == "async-start" and not x.operands:
            self.prepared[x.name] = queue, seconds  # an async-update brings its operands; it begins there
            return
        self.launch(x.name, queue, seconds)
        if queue == "dma":
            self.spent.busy[HBM_QUEUE] += seconds - self.sim.machine.dma_seconds
        if x.op == "collective-permute-start":
            # Each direction has its own queue, but queues_that_limit knows only "ici". A permute uses one of the two
            # directions, hence half of the link time.
            self.spent.busy["ici"] += seconds / 2

    def _task(self, x: Instruction) -> tuple[str, float]:
        """Return (queue, seconds) of an asynchronous operation; the seconds are without waiting for the queue."""
        machine, module = self.sim.machine, self.sim.module
        if is_collective(x):
            seconds = self.sim.collectives.seconds(self.computation, x)
            if x.op != "collective-permute-start":
                return "ici", seconds
            return ("ici back" if goes_back(x) else "ici forth"), seconds  # one direction of one ring
        called = called_by(module, x) if x.op in ("async-start", "call-start") else None
        if called and (collective := collective_in(called)):
            offloaded = OFFLOADED in x.attributes
            seconds = self.sim.collectives.seconds(called, collective, offloaded=offloaded)
            if offloaded:
                # The links limit it, and the TensorCore is free. That a sparse core keeps up with them is assumed, so
                # its time is counted for the range of the prediction.
                self.spent.busy["sparse core"] += seconds
            return "ici", seconds
        if called and "execution_thread" in x.attributes:  # a thread other than the TensorCore's
            return "sparse core", self.sim.spent_in(called.name).seconds
        return copy_queue_and_seconds(machine, module, x)

    def finish(self, x: Instruction) -> None:
        """Handle an `-update` or `-done`: begin a prepared operation, pass its end time on, or wait for it."""
        key = x.operands[0] if x.operands else ""
        begun = self.computation.by_name.get(key)
        if begun is not None and crosses_slices(begun):
            # A `send` is done when its data has left the device; only the result of the exchange is waited for.
            if x.op == "recv-done":
                self.wait(rendezvous(begun))
        elif key in self.prepared:
            self.launch(x.name, *self.prepared.pop(key))
        elif key in self.ends and x.op.endswith("-update"):
            self.ends[x.name] = self.ends[key]
        elif key in self.ends:
            self.wait(key)

    def _collective_fusion(self, x: Instruction) -> bool:
        """Handle a fusion that starts, awaits or carries out a collective. Return False for any other fusion.

        The fusions that start and await the same collective are matched by its channel id.
        """
        inner = self.sim.module.computations.get(x.attribute("calls") or "")
        collective = collective_in(inner) if inner else None
        if inner is None:
            return False
        role = target_of(inner.root)
        channel = re.search(r"channel_id=(\d+)", collective.attributes) if collective else None
        key = f"channel {channel[1]}" if channel else ""
        if role == "AsyncCollectiveStart" and collective:
            self.launch(key, "ici", self.sim.collectives.seconds(inner, collective))
            return True
        if role == "AsyncCollectiveDone":
            self.wait(key)
            return True
        # A fusion with this configuration computes while a collective that was started earlier is in flight. Its own
        # time is that of its computation, so it is simulated as work of the core.
        if collective is None or "async_collective_fusion_config" in collective.attributes:
            return False
        # An all-reduce of which each device keeps a slice is a reduce-scatter, which sends half as much.
        scattered = collective.op == "all-reduce" and any(y.op == "dynamic-slice" for y in inner.instructions)
        self.block("ici", self.sim.collectives.seconds(inner, collective, scattered=scattered))
        return True

    def _on_core(self, x: Instruction) -> None:
        """Run a fusion, a kernel or any other synchronous instruction on the core."""
        machine = self.sim.machine
        if x.op == "custom-call":
            self._kernel(x)
            return
        if x.op != "fusion" and not self.touches_arrays(x):
            return  # scalars: the scalar unit computes them beside the vector unit, at no cost
        flops = self.sim.work.flops(self.computation, x)
        touched = self.sim.work.hbm_bytes(self.computation, x)
        unit_flops = self.sim.work.unit_flops(self.computation, x) if flops else 0.0
        multiplying = unit_flops / (machine.matmul_flops * machine.matmul_share)
        elementwise = self.sim.work.vector_work(self.computation, x).operations / machine.vector_ops_per_second
        moving = self._hbm_seconds(touched, max(multiplying, elementwise))
        # The units of a core work in the same cycles, and transfers overlap with them. So the slowest one counts.
        # Vector arithmetic limits only random numbers and arrays that are not in HBM, and counts as "memory".
        kind = "matmul" if flops and multiplying >= max(moving, elementwise) else "memory"
        seconds = max(multiplying, elementwise, moving) + machine.op_seconds
        self.advance(kind, seconds, flops=flops, size_bytes=touched, overhead_seconds=machine.op_seconds)
        self.spent.flops["matmul"] += flops

    def _hbm_seconds(self, touched: float, computing: float) -> float:
        """Return the time in which the core moves `touched` bytes between HBM and itself, from now on.

        Copies that are in flight use HBM, too. They get its bandwidth while the core does not need it, and half of it
        while the core does. So the core delays them, and they delay the core.

        Args:
            touched: The bytes that the core reads and writes.
            computing: The seconds that the core computes meanwhile.
        """
        alone = touched / self.sim.machine.hbm_bytes_per_second
        self.spent.busy[HBM_QUEUE] += alone
        shared = alone + min(alone, max(0.0, self.free_at["dma"] - self.spent.seconds))
        if computing < shared:
            self._delay_copies(self.spent.seconds, lambda left: min(alone, left))
        else:  # copies use the bandwidth that the core leaves
            self._delay_copies(self.spent.seconds, lambda left: alone if left > computing - alone else 0.0)
        return shared

    def call(self, name: str, trips: int = 1, pause_seconds: float = 0.0, pause: str = "") -> None:
        """Run another computation `trips` times, which delays the copies in flight by its own use of HBM."""
        begin, used = self.spent.seconds, trips * self.simulation.spent_in(name).busy[HBM_QUEUE]
        super().call(name, trips, pause_seconds, pause)
        unused = self.spent.seconds - begin - used
        self._delay_copies(begin, lambda left: used if left > unused else 0.0)

    def _delay_copies(self, begin: float, delay: Callable[[float], float]) -> None:
        """Let the copies that are in flight at `begin` end later. `delay` gets the seconds that a copy still needs."""
        if self.free_at["dma"] <= begin:
            return
        self.free_at["dma"] += delay(self.free_at["dma"] - begin)
        for key, (end, queue) in self.ends.items():
            if queue == "dma" and end > begin:
                self.ends[key] = end + delay(end - begin), queue

    def _grouped(self, x: Instruction) -> bool:
        """Run a product of groups of rows with one matrix each. Return False for any other kernel."""
        machine, shape = self.sim.machine, grouped_shape(self.computation, x)
        if shape is None:
            return is_metadata(x)
        touched = self.sim.work.hbm_bytes(self.computation, x)
        multiplying = shape.unit_flops(machine.matrix_unit) / (machine.matmul_flops * machine.matmul_share)
        moving = self._hbm_seconds(touched, multiplying)
        kind = "matmul" if multiplying >= moving else "memory"
        seconds = max(multiplying, moving) + machine.op_seconds
        self.advance(kind, seconds, flops=shape.flops, size_bytes=touched, overhead_seconds=machine.op_seconds)
        self.spent.flops["matmul"] += shape.flops
        return True

    def _kernel(self, x: Instruction) -> None:
        """Run a custom call: a splash attention kernel, an unknown kernel, or a helper of the compiler."""
        target = target_of(x)
        if target in FREE_TARGETS:
            return
        if target == KERNEL and self._grouped(x):
            return
        shape = kernel_shape(self.computation, x) if target == KERNEL else None
        if shape is None:
            # The cost of an unknown kernel cannot be read from the program: assume that HBM limits it. The kind
            # "kernels" marks the prediction as uncertain.
            touched = self.sim.work.hbm_bytes(self.computation, x)
            kind = "kernels" if target == KERNEL else "memory"
            self.advance(kind, self._hbm_seconds(touched, 0.0), size_bytes=touched)
            return
        self.advance("attention", kernel_seconds(self.sim.machine, self.sim.chip, shape), flops=shape.flops)
        self.spent.flops["attention"] += shape.flops
