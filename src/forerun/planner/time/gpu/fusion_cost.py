"""The time of fused kernels, copies and other kernels that memory limits."""

from __future__ import annotations

from forerun.planner.hlo import HOST, Computation, Instruction
from forerun.planner.time.gpu.gpu_model import GpuModel
from forerun.planner.time.instruction_cost import InstructionWork

# A kernel finds its operands in the L2 cache if all its data takes at most this share of it. Assumed, 2026-11.
CACHED_SHARE = 0.5


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
