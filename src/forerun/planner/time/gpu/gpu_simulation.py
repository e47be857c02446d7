"""Simulation of a scheduled GPU program: one compute stream in program order, and queues for asynchronous operations.

The queues are: links (NVLink or PCIe between the GPUs of a machine), network (between machines), from host and to host.
Collectives use one stream, so the links and the network carry one collective at a time. While a collective is active,
other kernels are slower, because NCCL occupies some of the SMs.

Not modelled: power limits that depend on the data, contention for HBM, and differences between the GPUs of a group.
"""

from __future__ import annotations

import re
from typing import ClassVar

from forerun.planner.hlo import HOST, Computation, Instruction, Module
from forerun.planner.time.execution import (
    ComputationRun,
    ProgramSimulation,
    Spent,
    called_by,
    collective_in,
    target_of,
)
from forerun.planner.time.gpu.collective_cost import LINKS, NETWORK, collective_queue_and_seconds
from forerun.planner.time.gpu.gpu_model import GpuModel
from forerun.planner.time.gpu.kernel_cost import attention_seconds, attention_shape, gemm_seconds, is_fused_attention
from forerun.planner.time.instruction_cost import InstructionWork
from forerun.planner.time.matrix_work import MatrixProduct, dot_product
from forerun.planner.time.transfers import COLLECTIVES, is_collective, moved_bytes_and_direction

# A kernel finds its operands in the L2 cache if all its data takes at most this share of it. Assumed, 2026-11.
CACHED_SHARE = 0.5
FROM_HOST, TO_HOST = "from host", "to host"
FREE_TARGETS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer"}
# Kernels whose time follows from the bytes that they touch. Others are reported as kernels of unknown cost.
KNOWN_TARGETS = re.compile(r"__cub\$|__gpu\$TopK|__cudnn\$norm|PinToDevice|xla\.gpu\.")


class GpuSimulation(ProgramSimulation):
    """A simulation of one scheduled module on one GPU."""

    def __init__(self, module: Module, model: GpuModel) -> None:
        super().__init__(module)
        self.model = model
        self.work = InstructionWork(module)
        loops = (x for one in module.computations.values() for x in one.instructions if x.op == "while")
        self.loop_bodies = {x.attribute("body"): x.name for x in loops}
        # The first call of fused attention processes all documents of usual rows. A loop whose number of iterations
        # depends on data processes the rest, which is assumed to be empty (nn/gpu_attention.py).
        self.attention_loops = {
            name
            for body, name in self.loop_bodies.items()
            if any(is_fused_attention(x) for x in module.computations[body or ""].instructions)
        }

    def run_of(self, computation: Computation) -> ComputationRun:
        return _GpuRun(self, computation)

    @property
    def guessed_loops(self) -> list[str]:
        return [name for name in super().guessed_loops if name not in self.attention_loops]

    def gemms_in(self, computation: Computation, x: Instruction) -> list[MatrixProduct]:
        """Return the matrix multiplications of an instruction, including those inside a fusion."""
        if x.op != "fusion":
            shape = dot_product(computation, x)
            return [shape] if shape else []
        inner = self.module.computations.get(x.attribute("calls") or "")
        return [gemm for y in inner.instructions for gemm in self.gemms_in(inner, y)] if inner else []


class _GpuRun(ComputationRun):
    """One execution of one computation on a GPU."""

    queues_that_limit: ClassVar[tuple[str, ...]] = (LINKS, NETWORK, FROM_HOST, TO_HOST)

    def __init__(self, simulation: GpuSimulation, computation: Computation) -> None:
        super().__init__(simulation, computation)
        self.sim = simulation
        self.communicating_until = 0.0  # end of the last collective

    def play(self) -> Spent:
        if self.computation.name in self.sim.loop_bodies:  # the host starts each iteration
            seconds = self.sim.model.loop_seconds
            self.advance("memory", seconds, overhead_seconds=seconds)
        return super().play()

    def waiting_for(self, queue: str) -> str:
        return {LINKS: "collectives", NETWORK: "network"}.get(queue, "host")

    def start(self, x: Instruction) -> None:
        inner = called_by(self.sim.module, x) if x.op == "async-start" else None
        collective = x if is_collective(x) else collective_in(inner) if inner else None
        if collective is not None:
            around = self.computation if collective is x or inner is None else inner
            self._collective(around, collective)
            return
        if inner is not None and x.op == "async-start":  # other work that may run beside the next instructions
            self.call(inner.name)
            return
        moved, to_host = moved_bytes_and_direction(x, inner)
        seconds = moved / self.sim.model.host_bytes_per_second + self.sim.model.copy_seconds
        self.launch(x.name, TO_HOST if to_host else FROM_HOST, seconds)

    def finish(self, x: Instruction) -> None:
        key = x.operands[0] if x.operands else ""
        if key in self.ends and x.op.endswith("-update"):
            self.ends[x.name] = self.ends[key]
        elif key in self.ends:
            self.wait(key)

    def synchronous(self, x: Instruction) -> None:
        if x.op in COLLECTIVES:
            self._collective(self.computation, x, waits=True)
            return
        inner = self.sim.module.computations.get(x.attribute("calls") or "") if x.op == "fusion" else None
        collective = collective_in(inner) if inner else None
        if inner is not None and collective is not None:  # XLA fuses a reduce-scatter with the slice that it updates
            self._collective(inner, collective, waits=True)
        elif x.op == "custom-call":
            self._custom_call(x)
        else:
            self._kernel(x)

    def run_loop(self, x: Instruction) -> None:
        self.sim.loops.trips(self.computation, x)
        if x.name in self.sim.loops.guessed and x.name in self.sim.attention_loops:
            return
        super().run_loop(x)

    def _collective(self, around: Computation, x: Instruction, *, waits: bool = False) -> None:
        """Start a collective, or carry it out if the next instruction waits for it."""
        queue, seconds = collective_queue_and_seconds(self.sim.model, around, x)
        # All collectives use one stream: a collective on the network also waits for one on the links.
        self.free_at[queue] = max(self.free_at[queue], self.communicating_until)
        if waits or '"is_sync":true' in x.attributes:
            self.block(queue, seconds)
        else:
            self.launch(self.current.name, queue, seconds)
        self.communicating_until = max(self.communicating_until, self.free_at[queue])

    def _compute(self, kind: str, seconds: float, *, flops: float = 0.0, size_bytes: float = 0.0) -> None:
        """Run a kernel. It is slower while a collective is active."""
        model = self.sim.model
        beside = max(0.0, self.communicating_until - self.spent.seconds)
        done_beside = beside * (1 - model.slowdown)
        slowed = seconds / (1 - model.slowdown) if seconds <= done_beside else beside + seconds - done_beside
        self.advance(
            kind,
            slowed + model.kernel_seconds,
            flops=flops,
            size_bytes=size_bytes,
            overhead_seconds=model.kernel_seconds,
        )

    def _custom_call(self, x: Instruction) -> None:
        """Run a library call: cuBLAS, cuDNN attention, or an unknown kernel."""
        target = target_of(x)
        if target in FREE_TARGETS:
            return
        attention = attention_shape(self.computation, x)
        if attention is not None:
            self._compute("attention", attention_seconds(self.sim.model, attention), flops=attention.flops)
            self.spent.flops["attention"] += attention.flops
            return
        if dot_product(self.computation, x) is not None:
            self._kernel(x)
            return
        touched = self.sim.work.hbm_bytes(self.computation, x)
        kind = "memory" if KNOWN_TARGETS.search(target) else "kernels"
        self._compute(kind, memory_seconds(self.sim.model, touched), size_bytes=touched)

    def _kernel(self, x: Instruction) -> None:
        """Run a gemm, a fusion or any other kernel."""
        model, work = self.sim.model, self.sim.work
        if x.op not in ("fusion", "custom-call") and not self.touches_arrays(x):
            return
        gemms = self.sim.gemms_in(self.computation, x)
        computing = sum(gemm_seconds(model, gemm) for gemm in gemms)
        touched = work.hbm_bytes(self.computation, x)
        if x.op == "custom-call":
            touched -= sum(shape.size_bytes for shape in x.shapes[1:])  # the workspace of cuBLAS
        moving = memory_seconds(model, touched)
        if hosted := host_bytes(self.computation, x, work):
            self.block(FROM_HOST, hosted / model.host_bytes_per_second)
            return
        flops = sum(gemm.flops for gemm in gemms)
        kind = "matmul" if flops and computing >= moving else "memory"
        self._compute(kind, max(computing, moving), flops=flops, size_bytes=touched)
        self.spent.flops["matmul"] += flops


def memory_seconds(model: GpuModel, touched_bytes: float) -> float:
    """Return the time to read and write `touched_bytes`, through the L2 cache if they fit."""
    cached = touched_bytes <= model.l2_bytes * CACHED_SHARE
    return touched_bytes / (model.l2_bytes_per_second if cached else model.hbm_bytes_per_second)


def host_bytes(computation: Computation, x: Instruction, work: InstructionWork) -> float:
    """Return the bytes that a kernel reads from or writes to the memory of the host."""
    operands = (computation.by_name.get(name) for name in x.operands)
    if not any(shape.space == HOST for y in (x, *operands) if y for shape in y.shapes):
        return 0.0
    # A slice of a stacked array moves between the host and the device: the smaller side is what moves.
    return min(sum(s.size_bytes for s in x.shapes), max(1.0, work.hbm_bytes(computation, x)))
