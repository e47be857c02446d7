"""Breakdown of HBM at its peak by contents. The parts add up to the compiler's own total.

The compiler gives every temporary value an address, a size and a lifetime. The peak is the moment at which live values
cover the most of the heap. Each value is classified by the instruction that produces it. Values that share an address
(a loop's input and output) count once. Bytes that only fill up tiles are padding. The rest of the total is gaps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.planner.hlo import Instruction, Module, Shape, shapes_in
from forerun.units import Bytes

_HEAP = re.compile(r"^allocation \d+: size \d+, preallocated-temp:")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-<>]+)(\{[\d,]*\})? .*?\(size=(\d+),offset=(\d+)\)(?:: (.*))?")
_RANGE = re.compile(r"^    ([\w.\-<>]+)(\{[\d,]*\}):(\d+)-(\d+)$")

GRADIENTS = "gradients"
ACTIVATIONS = "saved activations"
GATHERED = "weights in use"
LOSS = "logits and loss"
KERNELS = "attention kernels"
OPTIMIZER = "optimizer update"
WORKING = "working activations"
PADDING = "padding"
GAPS = "gaps between buffers"


@dataclass(frozen=True)
class Value:
    """A temporary value in HBM. Offsets and sizes are in bytes."""

    name: str  # of the instruction that produces it
    index: tuple[int, ...]  # position in a tuple; empty for an array
    offset: int
    size: int
    begins: int  # first and last position in the schedule at which it is alive
    ends: int
    content: int  # size without padding


@dataclass(frozen=True)
class ModelShapes:
    """Facts about the model that the classification needs. Shapes are those of one device's shards."""

    layers: int | None
    weights: frozenset[tuple[int, ...]]  # stacked weights are included with and without their layer dimension

    @classmethod
    def of(cls, layers: int | None, local_shapes: Sequence[Sequence[int]]) -> ModelShapes:
        """Return the facts for weights with these shapes. Weights whose first dimension is `layers` are stacked."""
        whole = {tuple(shape) for shape in local_shapes}
        one_layer = {shape[1:] for shape in whole if shape[:1] == (layers,)}
        return cls(layers, frozenset(whole | one_layer | {(1, *shape) for shape in one_layer}))


def ledger(
    assignment: str,
    live_ranges: str,
    module: Module,
    arguments: Mapping[str, int],
    peak_bytes: int,
    shapes: ModelShapes,
) -> dict[str, Bytes]:
    """Return the bytes of each part of the peak, largest first. Their sum is `peak_bytes`.

    Args:
        assignment: Text of the compiler's buffer assignment.
        live_ranges: Text of the compiler's live ranges.
        module: The scheduled program.
        arguments: Bytes of each group of arguments without padding, and their padding as a separate part.
        peak_bytes: The compiler's total.
        shapes: The shapes of the model's weights.
    """
    parts = {PADDING: 0, **arguments}
    made = {x.name: x for computation in module.computations.values() for x in computation.instructions}
    for value, size in alive_at_peak(temporaries(assignment, live_ranges)):
        kind = _kind(made.get(value.name), value.index, shapes)
        content = min(size, value.content)
        parts[kind] = parts.get(kind, 0) + content
        parts[PADDING] += size - content
    parts[GAPS] = peak_bytes - sum(parts.values())
    return {name: Bytes(size) for name, size in sorted(parts.items(), key=lambda part: -part[1]) if size}


def temporaries(assignment: str, live_ranges: str) -> list[Value]:
    """Return the temporary values in the heap of HBM."""
    alive = {(m[1], m[2]): (int(m[3]), int(m[4])) for line in live_ranges.splitlines() if (m := _RANGE.match(line))}
    values, inside = [], False
    for line in assignment.splitlines():
        if line.startswith("allocation"):
            inside = _HEAP.match(line) is not None
        elif inside and (m := _VALUE.match(line)):
            key = (m[1], m[2] or "{}")
            if key in alive:
                index = tuple(int(n) for n in key[1].strip("{}").split(",") if n)
                size, shapes = int(m[3]), shapes_in(m[5] or "")
                content = shapes[0].content_bytes if len(shapes) == 1 else size
                values.append(Value(m[1], index, int(m[4]), size, *alive[key], content))
    return values


def alive_at_peak(values: Sequence[Value]) -> list[tuple[Value, int]]:
    """Return (value, bytes that it adds to the covered addresses) for each live value at the peak."""
    if not values:
        return []
    # Usage can only grow where a value begins. Small values cannot move the peak by much, so skip their moments.
    large = [v for v in values if v.size >= max(values, key=lambda v: v.size).size // 1024]
    moments = sorted({v.begins for v in large})
    return max((_live_values(values, moment) for moment in moments), key=lambda parts: sum(size for _, size in parts))


def _live_values(values: Sequence[Value], moment: int) -> list[tuple[Value, int]]:
    """Return the values that are alive at `moment`, with the bytes that each adds to the covered addresses."""
    alive = [v for v in values if v.begins <= moment <= v.ends]
    parts, covered = [], 0
    for value in sorted(alive, key=lambda v: (v.offset, -v.size)):
        own = value.offset + value.size - max(value.offset, covered)
        if own > 0:
            parts.append((value, own))
            covered = value.offset + value.size
    return parts


def _kind(x: Instruction | None, index: tuple[int, ...], shapes: ModelShapes) -> str:
    """Return the part that a value belongs to, from the instruction that produces it."""
    if x is None:
        return WORKING
    shape = x.shapes[index[0]] if index and index[0] < len(x.shapes) else x.shapes[0] if x.shapes else None
    where = x.op_name()
    backward = "transpose(" in where
    if "/loss/" in where:
        return GRADIENTS if "->VE" in where else LOSS
    if "/optimizer/" in where:
        return OPTIMIZER
    if shape is not None and _is_saved(shape, x, shapes):
        return ACTIVATIONS
    if shape is not None and shape.dims in shapes.weights:
        return GRADIENTS if backward or shape.dtype == "f32" else GATHERED
    if "all-gather" in x.op or "all-gather" in x.name:
        return GATHERED
    return KERNELS if "/attention/" in where and x.op == "custom-call" else WORKING


def _is_saved(shape: Shape, x: Instruction, shapes: ModelShapes) -> bool:
    """Return whether a value is stacked over the layers and not a weight.

    Such values are activations that the forward pass saves for the backward pass.
    """
    return shape.dims[:1] == (shapes.layers,) and len(shape.dims) >= 3 and shape.dims not in shapes.weights
