"""The memory of a program: the compiler's report by groups of arguments, and the contents of HBM at its peak.

The parts of the peak add up to the compiler's own total. The compiler gives every temporary value an address, a size
and a lifetime. The peak is the moment at which live values cover the most of the heap. Each value is classified by the
instruction that produces it. Values that share an address (a loop's input and output) count once. Bytes that only fill
up tiles are padding. The rest of the total is gaps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from forerun.planner.hlo import Instruction, Module, Shape, shapes_in
from forerun.units import Bytes

REPORT, ASSIGNMENT = "*-memory-usage-report.txt", "*-buffer-assignment.txt"
HBM = "default"
HOST = ("cmem", "host")  # memory spaces of offloaded values: the first by colour 5, the second by colour 4

_SPACE = re.compile(r"^Memory Space: (\w+)")
_TOTAL = re.compile(r"^Total bytes: (\d+) ")
_PARAMETER = re.compile(r"^allocation \d+: size (\d+), (.*?)parameter (\d+), (?:shape \|(.*?)\|)?")
_TARGET = re.compile(r'custom_call_target="(__cu(?:blas|dnn)\$[^"]*)"')
_BYTE_TYPES = ("s8", "u8")
_FLOAT32_BYTES, _BFLOAT16_BYTES = 4, 2
_HEAP = re.compile(r"^allocation \d+: size (\d+), (?:page \d+, )?preallocated-temp:")  # newer versions have pages
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-<>]+)(\{[\d,]*\})? .*?\(size=(\d+),offset=(\d+)\)(?:: (.*))?")
_RANGE = re.compile(r"^    ([\w.\-<>]+)(\{[\d,]*\}):(\d+)-(\d+)$")

_LOSS = re.compile(r"[/(]loss[/)]")

GRADIENTS = "gradients"
ACTIVATIONS = "saved activations"
GATHERED = "weights in use"
LOSS = "logits and loss"
KERNELS = "attention kernels"
OPTIMIZER = "optimizer update"
WORKSPACE = "library workspace"
WORKING = "working activations"
PADDING = "padding"
GAPS = "gaps between buffers"


class Unreadable(Exception):
    """The files are missing, incomplete, or not in a known format."""


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a program per device. In HBM, weights + optimizer + batch + working == peak."""

    peak_bytes: Bytes
    weights_bytes: Bytes
    optimizer_bytes: Bytes
    batch_bytes: Bytes
    host_bytes: Bytes  # offloaded to the host's memory

    @property
    def working_bytes(self) -> Bytes:
        """Gradients, activations and everything else that is not an argument of the step."""
        return Bytes(self.peak_bytes - self.weights_bytes - self.optimizer_bytes - self.batch_bytes)


def space_totals(report: str) -> dict[str, int]:
    """Return the bytes of each memory space, from the text of the memory-usage report."""
    totals: dict[str, int] = {}
    space = ""
    for line in report.splitlines():
        if found := _SPACE.match(line):
            space = found[1]
        elif (found := _TOTAL.match(line)) and space:
            totals[space] = int(found[1])
    if HBM not in totals or not report.endswith("\n\n"):
        raise Unreadable("the memory-usage report has no total for HBM, or no end")
    return totals


def argument_bytes(assignment: str, groups: Sequence[str]) -> dict[str, int]:
    """Return the HBM bytes of each group of arguments, including padding, from the text of the buffer assignment.

    `groups` has the group of each argument, in order.
    """
    sizes = dict.fromkeys(groups, 0)
    missing = set(range(len(groups)))
    for line in assignment.splitlines():
        if not (found := _PARAMETER.match(line)):
            continue
        number = int(found[3])
        if number >= len(groups):
            raise Unreadable(f"the buffer assignment has an argument {number}, but the step has only {len(groups)}")
        missing.discard(number)
        if "color" not in found[2]:  # buffers in HBM have no colour
            sizes[groups[number]] += int(found[1])
    if missing:
        raise Unreadable(f"the buffer assignment lacks {len(missing)} of the step's {len(groups)} arguments")
    return sizes


def argument_padding(assignment: str, groups: Sequence[str]) -> dict[str, int]:
    """Return the padding of each group of arguments: HBM bytes that only fill up tiles."""
    padding = dict.fromkeys(groups, 0)
    for line in assignment.splitlines():
        if (found := _PARAMETER.match(line)) and "color" not in found[2]:
            shapes = shapes_in(found[4] or "")
            padding[groups[int(found[3])]] += int(found[1]) - shapes[0].content_bytes if len(shapes) == 1 else 0
    return padding


def memory_report(folder: Path, groups: Sequence[str]) -> MemoryReport:
    """Return the memory of a program, from the compiler's dump.

    Args:
        folder: The folder of the dump.
        groups: The group of each argument of the step, in order: weights, optimizer or batch.

    Raises:
        Unreadable: A file is missing, incomplete, or not in a known format.
    """
    totals = space_totals(newest(folder, REPORT))
    arguments = argument_bytes(newest(folder, ASSIGNMENT), groups)
    report = MemoryReport(
        peak_bytes=Bytes(totals[HBM]),
        weights_bytes=Bytes(arguments.get("weights", 0)),
        optimizer_bytes=Bytes(arguments.get("optimizer", 0)),
        batch_bytes=Bytes(arguments.get("batch", 0)),
        host_bytes=Bytes(sum(totals.get(space, 0) for space in HOST)),
    )
    if report.working_bytes < 0:
        raise Unreadable(f"the arguments are larger than the peak of {report.peak_bytes}")
    return report


def newest(folder: Path, pattern: str) -> str:
    """Return the text of the newest file that matches a pattern."""
    return newest_file(folder, pattern).read_text("utf-8")


def newest_file(folder: Path, pattern: str) -> Path:
    """Return the newest file that matches a pattern. The compiler may write a second one if it retries."""
    files = list(folder.glob(pattern))
    if not files:
        raise Unreadable(f"there is no {pattern}")
    return max(files, key=lambda path: path.stat().st_mtime_ns)


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
    is_hidden: bool = False  # a workspace that the program lacks


@dataclass(frozen=True)
class ModelShapes:
    """Facts about the model that the classification needs. Shapes are those of one device's shards."""

    layers: int | None
    weights: frozenset[tuple[int, ...]]  # stacked weights are included with and without their layer dimension
    tables: frozenset[tuple[int, ...]] = frozenset()  # matrices that are not stacked, such as the embedding

    @classmethod
    def of(cls, layers: int | None, local_shapes: Sequence[Sequence[int]]) -> ModelShapes:
        """Return the facts for weights with these shapes. Weights whose first dimension is `layers` are stacked."""
        whole = {tuple(shape) for shape in local_shapes}
        one_layer = {shape[1:] for shape in whole if shape[:1] == (layers,)}
        tables = {shape for shape in whole if len(shape) == 2 and shape[0] != layers}
        return cls(layers, frozenset(whole | one_layer | {(1, *shape) for shape in one_layer}), frozenset(tables))

    def is_gathered_table(self, dims: tuple[int, ...]) -> bool:
        """Return whether a value has the shape of a matrix that is not stacked, or of its shards from some devices."""
        if len(dims) != 2 or not all(dims):
            return False
        (rows, columns), tables = dims, (table for table in self.tables if all(table))
        return any((rows == r and columns % c == 0) or (columns == c and rows % r == 0) for r, c in tables)

    def is_transposed_stack(self, dims: tuple[int, ...]) -> bool:
        """Return whether a value is a stacked weight with its dimensions in another order, as on GPUs."""
        stacks = (shape for shape in self.weights if len(shape) >= 3 and shape[0] == self.layers != 1)
        return any(sorted(dims) == sorted(shape) for shape in stacks)


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
    values = [*temporaries(assignment, live_ranges), *hidden_values(module, assignment, live_ranges)]
    for value, size in alive_at_peak(values):
        kind = WORKSPACE if value.is_hidden else _kind(made.get(value.name), value.index, shapes)
        content = min(size, value.content)
        parts[kind] = parts.get(kind, 0) + content
        parts[PADDING] += size - content
    parts[GAPS] = peak_bytes - sum(parts.values())
    return {name: Bytes(size) for name, size in sorted(parts.items(), key=lambda part: -part[1]) if size}


def temporaries(assignment: str, live_ranges: str) -> list[Value]:
    """Return the temporary values in the heap of HBM."""
    alive = {(m[1], m[2]): (int(m[3]), int(m[4])) for line in live_ranges.splitlines() if (m := _RANGE.match(line))}
    values, inside, base, size = [], False, 0, 0
    for line in assignment.splitlines():
        if line.startswith("allocation"):
            heap = _HEAP.match(line)
            inside = heap is not None
            base, size = (base + size, int(heap[1])) if heap else (base, size)  # a page follows the one before
        elif inside and (m := _VALUE.match(line)):
            key = (m[1], m[2] or "{}")
            if key in alive:
                index = tuple(int(n) for n in key[1].strip("{}").split(",") if n)
                own, shapes = int(m[3]), shapes_in(m[5] or "")
                content = shapes[0].content_bytes if len(shapes) == 1 else own
                values.append(Value(m[1], index, base + int(m[4]), own, *alive[key], content))
    return values


def hidden_values(module: Module, assignment: str, live_ranges: str) -> list[Value]:
    """Return the estimated workspaces of kernels, each above the heap and alive while its kernel runs."""
    sizes = dict(hidden_workspaces(module))
    if not sizes:
        return []
    top = heap_bytes(assignment)
    found: dict[str, Value] = {}
    for line in live_ranges.splitlines():
        if (m := _RANGE.match(line)) and m[1] in sizes:
            moment = min(int(m[3]), found[m[1]].begins if m[1] in found else int(m[3]))
            found[m[1]] = Value(m[1], (), top, sizes[m[1]], moment, moment, sizes[m[1]], is_hidden=True)
    return list(found.values())


def hidden_bytes(module: Module, assignment: str, live_ranges: str) -> int:
    """Return the bytes that estimated workspaces add to the compiler's total."""
    hidden = hidden_values(module, assignment, live_ranges)
    if not hidden:
        return 0
    values, top = [*temporaries(assignment, live_ranges), *hidden], heap_bytes(assignment)
    most = max(sum(size for _, size in _live_values(values, one.begins)) for one in hidden)
    return max(most - top, 0)


def heap_bytes(assignment: str) -> int:
    """Return the size of the heap of temporary values in HBM."""
    return sum(int(found[1]) for line in assignment.splitlines() if (found := _HEAP.match(line)))


def alive_at_peak(values: Sequence[Value]) -> list[tuple[Value, int]]:
    """Return (value, bytes that it adds to the covered addresses) for each live value at the peak."""
    if not values:
        return []
    # Usage can only grow where a value begins. Small values cannot move the peak by much, so skip their moments.
    smallest_bytes = max(v.size for v in values) // 1024
    large = [v for v in values if v.size >= smallest_bytes]
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
    if is_workspace(x, index):
        return WORKSPACE
    if _LOSS.search(where):
        if shape is not None and shapes.is_gathered_table(shape.dims):
            return GRADIENTS if shape.dtype == "f32" else GATHERED
        return GRADIENTS if "->VE" in where else LOSS
    if "/optimizer/" in where:
        return OPTIMIZER
    if shape is not None and _is_saved(shape, x, shapes):
        return ACTIVATIONS
    if shape is not None and shape.dims in shapes.weights:
        return GRADIENTS if backward or shape.dtype == "f32" else GATHERED
    if "all-gather" in x.op or "all-gather" in x.name:
        return GATHERED
    if shape is not None and shapes.is_transposed_stack(shape.dims):
        return GRADIENTS if backward else GATHERED
    return KERNELS if "/attention/" in where and is_attention_call(x) else WORKING


def _is_saved(shape: Shape, x: Instruction, shapes: ModelShapes) -> bool:
    """Return whether a value is stacked over the layers and not a weight.

    Such values are activations that the forward pass saves for the backward pass.
    """
    return shape.dims[:1] == (shapes.layers,) and len(shape.dims) >= 3 and shape.dims not in shapes.weights


def is_library_call(x: Instruction) -> bool:
    """Return whether an instruction calls cuBLAS or cuDNN."""
    return x.op == "custom-call" and _TARGET.search(x.attributes) is not None


def is_attention_call(x: Instruction) -> bool:
    """Return whether an instruction is an attention kernel: cuDNN's on GPUs, a custom kernel on TPUs."""
    found = _TARGET.search(x.attributes) if x.op == "custom-call" else None
    return x.op == "custom-call" and (found is None or "fmha" in found[1])


def is_workspace(x: Instruction, index: tuple[int, ...]) -> bool:
    """Return whether an element of an instruction's result is a library's workspace: the last one, of bytes."""
    last = len(x.shapes) - 1
    return bool(index) and index[0] == last > 0 and x.shapes[last].dtype in _BYTE_TYPES and is_library_call(x)


def hidden_workspaces(module: Module) -> Iterator[tuple[str, int]]:
    """Yield the name of each attention kernel whose workspace the program lacks, with an estimate of its bytes.

    Workspaces of cuBLAS are part of the program. That of cuDNN's attention is not: without a GPU, XLA writes `u8[0]`.
    """
    for computation in module.computations.values():
        for x in computation.instructions:
            target = _TARGET.search(x.attributes) if x.op == "custom-call" else None
            if target is None or "fmha" not in target[1] or not target[1].endswith("Backward"):
                continue
            if len(x.shapes) >= 4 and is_workspace(x, (len(x.shapes) - 1,)) and not x.shapes[-1].size_bytes:
                yield x.name, backward_workspace_bytes(x.shapes[0].dims, x.shapes[1].dims)


def backward_workspace_bytes(query: tuple[int, ...], key: tuple[int, ...]) -> int:
    """Return the workspace of cuDNN's backward attention kernel, from the shapes of the gradients.

    cuDNN's open frontend allocates a sum of query gradients in float32, a sum per row of the softmax in float32, and
    with grouped-query attention, key and value gradients of all query heads.

    Args:
        query: Batch, heads, length and size of the heads.
        key: The same of the keys. With grouped-query attention it has fewer heads.
    """
    sums = _FLOAT32_BYTES * (prod(query) + prod(query[:-1]))
    if query[1] == key[1]:
        return sums
    return sums + 2 * _BFLOAT16_BYTES * prod(key) * query[1] // key[1]
