"""What fills HBM at its fullest moment: a ledger that adds up to the compiler's own total.

The compiler gives every temporary value an address, a size and a lifetime. At the moment when most of the heap is
covered, what is alive is told by what made it. Values that share an address (a loop's input and output)
count once; bytes that only fill tiles are padding, and what is left of the total are gaps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.plan.hlo import Instruction, Module, Shape, shapes_in
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
    """A temporary in HBM."""

    name: str
    index: tuple[int, ...]  # inside a tuple
    offset: int
    size: int
    begins: int
    ends: int
    content: int  # bytes of it that are not padding


@dataclass(frozen=True)
class ModelShapes:
    """What the classifier must know of the job, per device."""

    layers: int | None
    weights: frozenset[tuple[int, ...]]  # local shapes, stacked ones with and without their layer dimension

    @classmethod
    def of(cls, layers: int | None, local_shapes: Sequence[Sequence[int]]) -> ModelShapes:
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
    """Bytes by what they are, largest first; the sum is `peak_bytes`. `arguments` come without their padding,
    and with it as a part of its own."""
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
    """The values in the heap of HBM."""
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
    """(value, bytes of it that no other value covers) at the fullest moment."""
    if not values:
        return []
    large = [v for v in values if v.size >= max(values, key=lambda v: v.size).size // 1024]
    moments = sorted({v.begins for v in large})
    return max((_covering(values, moment) for moment in moments), key=lambda parts: sum(size for _, size in parts))


def _covering(values: Sequence[Value], moment: int) -> list[tuple[Value, int]]:
    alive = [v for v in values if v.begins <= moment <= v.ends]
    parts, covered = [], 0
    for value in sorted(alive, key=lambda v: (v.offset, -v.size)):
        own = value.offset + value.size - max(value.offset, covered)
        if own > 0:
            parts.append((value, own))
            covered = value.offset + value.size
    return parts


def _kind(x: Instruction | None, index: tuple[int, ...], shapes: ModelShapes) -> str:
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
    """Stacked over the layers, and not a weight: what the forward pass keeps for the backward pass."""
    return shape.dims[:1] == (shapes.layers,) and len(shape.dims) >= 3 and shape.dims not in shapes.weights
