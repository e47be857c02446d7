"""Reading the scheduled program that the TPU compiler writes: computations, instructions, shapes.

Only what the step-time model needs is kept. Sizes are those in memory, tiles filled up: on a TPU an
array of 100 x 3 bfloat16 takes as much room as one of 104 x 128.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e4m3b11fnuz", "f8e8m0fnu"), 1.0),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2.0),
    **dict.fromkeys(("f32", "s32", "u32"), 4.0),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8.0),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 0.5),
    **dict.fromkeys(("s2", "u2"), 0.25),
}
HBM, VMEM, SYNC, HOST = 0, 1, 2, 5  # memory spaces: S(n) in a layout, none means HBM

_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r":T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) ")
_OUTER = re.compile(r"(?:ENTRY )?%[\w.\-<>]+ \(.*\{$|HloModule |\}(?:, execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-<>]+) = ")
_NAME = re.compile(r"%([\w.\-<>]+(?:#\d+)*)")
_DEPTH = re.compile(r"[(){}\[\],]")


@dataclass(frozen=True, slots=True)
class Shape:
    """One array: logical dimensions, where it lies, and the bytes it takes there."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    size_bytes: float

    @property
    def content_bytes(self) -> int:
        """Without what fills the last tiles."""
        return math.ceil(math.prod(self.dims) * ITEM_BYTES[self.dtype])


@dataclass(slots=True)
class Instruction:
    name: str
    op: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses: a parameter's number, a constant's value
    attributes: str
    is_root: bool
    index: int | None = None  # of a get-tuple-element
    shape_text: str = ""

    def attribute(self, name: str) -> str | None:
        """`calls`, `body`, `condition`, `to_apply`: the computation named there."""
        found = re.search(rf"\b{name}=%?([\w.\-<>]+)", self.attributes)
        return found[1] if found else None

    @property
    def size_bytes(self) -> float:
        return sum(shape.size_bytes for shape in self.shapes)

    def bytes_in(self, space: int) -> float:
        return sum(shape.size_bytes for shape in self.shapes if shape.space == space)

    def element(self, index: int) -> str:
        """The shape of one element of a tuple, as text."""
        return _elements(self.shape_text)[index]

    def op_name(self) -> str:
        """Where in the model it comes from, as JAX names it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(slots=True)
class Computation:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    by_name: dict[str, Instruction] = field(default_factory=dict)

    def add(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        self.by_name[instruction.name] = instruction

    @property
    def root(self) -> Instruction:
        return next(x for x in reversed(self.instructions) if x.is_root)

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        names = instruction.operands
        return self.by_name.get(names[number]) if number < len(names) else None

    def parameters(self) -> dict[int, Instruction]:
        return {int(x.literal): x for x in self.instructions if x.op == "parameter"}


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: str

    @cached_property
    def users(self) -> dict[tuple[str, str], list[tuple[Instruction, int]]]:
        """(computation, instruction) -> who reads it, and as which operand."""
        table: dict[tuple[str, str], list[tuple[Instruction, int]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for number, name in enumerate(instruction.operands):
                    table.setdefault((computation.name, name), []).append((instruction, number))
        return table


def shapes_in(text: str) -> tuple[Shape, ...]:
    """All arrays of a (possibly nested) shape, in order."""
    return tuple(_shape(dtype, dims, layout) for dtype, dims, layout in _SHAPE.findall(text) if dtype in ITEM_BYTES)


def _shape(dtype: str, dims_text: str, layout: str) -> Shape:
    dims = tuple(int(d.replace("<=", "")) for d in dims_text.split(",") if d)
    padded = list(dims)
    tile = _TILE.search(layout)
    if tile and dims:
        order = [int(d) for d in layout.split(":")[0].split(",") if d]  # minor to major
        for step, length in enumerate(reversed(tile[1].split(","))):
            if step < len(order):
                dim, tile_length = order[step], int(length)
                padded[dim] = -(-padded[dim] // tile_length) * tile_length
    space = _SPACE.search(layout)
    return Shape(dtype, dims, int(space[1]) if space else HBM, math.prod(padded) * ITEM_BYTES[dtype])


def parse(text: str) -> Module:
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in _whole_lines(text):
        if line[0] in "%E" and line.endswith("{") and " = " not in line.split("(", 1)[0]:
            head = _HEAD.match(line)
            if head is None:
                continue
            current = computations.setdefault(head[2], Computation(head[2]))
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(line, found)
            for name in instruction.operands:
                if "#" in name:
                    _add_element(current, name)
            current.add(instruction)
    return Module(computations, entry)


def _whole_lines(text: str) -> Iterator[str]:
    """An instruction a line. A Pallas kernel spans several, one of which begins with `}}`."""
    held: list[str] = []
    for line in text.splitlines():
        if not line:
            continue
        if held and (_INSTRUCTION.match(line) or _OUTER.match(line)):
            yield " ".join(held)
            held = []
        held.append(line)
    if held:
        yield " ".join(held)


def _instruction(line: str, found: re.Match[str]) -> Instruction:
    start = found.end()
    shape_end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", shape_end)
    closing = _closing(line, opening)
    inside, attributes = line[opening + 1 : closing], line[closing + 1 :]
    op = line[shape_end:opening].strip()
    index = re.search(r"index=(\d+)", attributes) if op == "get-tuple-element" else None
    return Instruction(
        name=found[2],
        op=op,
        shapes=shapes_in(line[start:shape_end]),
        operands=tuple(_NAME.findall(inside)),
        literal=inside.strip() if op in ("parameter", "constant") else "",
        attributes=attributes,
        is_root=found[1] is not None,
        index=int(index[1]) if index else None,
        shape_text=line[start:shape_end],
    )


def _add_element(computation: Computation, name: str) -> None:
    """Newer compilers write `%tuple#2` where older ones had a get-tuple-element of its own; we keep to those."""
    source_name, _, number = name.rpartition("#")
    if name in computation.by_name:
        return
    if "#" in source_name:
        _add_element(computation, source_name)
    text = computation.by_name[source_name].element(int(number))
    element = Instruction(
        name, "get-tuple-element", shapes_in(text), (source_name,), "", "", False, int(number), shape_text=text
    )
    computation.add(element)


def _elements(text: str) -> list[str]:
    """The elements of a tuple's shape: split at the commas that stand in no inner bracket."""
    parts, depth, start = [], 0, 1
    for match in _DEPTH.finditer(text):
        if match[0] in "({[":
            depth += 1
        elif match[0] in ")}]":
            depth -= 1
        if depth == (1 if match[0] == "," else 0):
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return parts


def _closing(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"no closing parenthesis in {text[:200]!r}")
