"""The time of a single transfer between device and host, or between HBM and VMEM.

The simulation decides how much of this time overlaps with other work.
"""

from __future__ import annotations

from forerun.planner.hlo import HBM, HOST, SYNC, Computation, Instruction, Module, Shape
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.collectives.replica_groups import source_target_pairs

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
_SEMAPHORE = 4  # memory space


def is_collective(x: Instruction) -> bool:
    return x.op.removesuffix("-start") in COLLECTIVES


def goes_back(x: Instruction) -> bool:
    """Return whether a collective-permute sends backwards around its ring, as seen from its first device."""
    pairs = source_target_pairs(x)
    first = min((min(pair) for pair in pairs), default=0)
    receivers = [target for source, target in pairs if source == first]
    senders = [source for source, target in pairs if target == first]
    return bool(senders) and (not receivers or receivers[0] > senders[0])


def copy_queue_and_seconds(machine: ChipModel, module: Module, x: Instruction) -> tuple[str, float]:
    """Return (queue, seconds) of an asynchronous copy or slice.

    The queue is "to host", "from host", or "dma" for transfers between HBM and VMEM.
    """
    inner = module.computations.get(x.attribute("calls") or "")
    moved, to_host = moved_bytes_and_direction(x, inner)
    if any(shape.space == HOST for shape in x.shapes):
        queue = "to host" if to_host else "from host"
        return queue, moved / machine.host_bytes_per_second + 2e-6
    if all(shape.space == HBM for shape in _arrays(x)):
        moved *= 2  # a copy within HBM reads and writes there
    return "dma", moved / machine.hbm_bytes_per_second + machine.dma_seconds


def payload_bytes(computation: Computation, module: Module, x: Instruction) -> float:
    """Return the bytes of a transfer: the operands of a collective, or what a copy moves."""
    inner = module.computations.get(x.attribute("calls") or "")
    within = next((y for y in inner.instructions if is_collective(y)), None) if inner else None
    if inner is not None and within is not None:
        computation, x = inner, within
    if is_collective(x):
        return sum(operand.size_bytes for name in x.operands if (operand := computation.by_name.get(name)))
    return moved_bytes_and_direction(x, inner)[0]


def _arrays(x: Instruction) -> list[Shape]:
    return [s for s in x.shapes if s.space not in (SYNC, _SEMAPHORE) and s.dims]


def moved_bytes_and_direction(x: Instruction, inner: Computation | None) -> tuple[float, bool]:
    """Return (bytes, whether they move to the host) of an asynchronous copy or slice."""
    arrays = _arrays(x)
    smallest = min((s.size_bytes for s in arrays), default=0.0)
    if x.op.startswith("dynamic-update-slice"):
        return smallest, True
    if x.op.startswith("dynamic-slice"):
        return smallest, False
    if inner is None:  # copy-start: (destination, source, context)
        return (arrays[0].size_bytes if arrays else 0.0), bool(arrays) and arrays[0].space == HOST
    root = inner.root
    while root.op == "bitcast" and (source := inner.operand(root, 0)):
        root = source
    if root.op == "dynamic-update-slice":
        update = inner.operand(root, 1)
        return (update.size_bytes if update else 0.0), any(s.space == HOST for s in root.shapes)
    if root.op in ("dynamic-slice", "slice", "copy"):
        source = inner.operand(root, 0)
        return root.size_bytes, source is not None and not any(s.space == HOST for s in source.shapes)
    return smallest, False
