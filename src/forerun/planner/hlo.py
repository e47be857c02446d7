"""Parser for the scheduled program (HLO text) that the TPU compiler writes: computations, instructions, shapes.

Only the parts that the step-time model needs are kept. Sizes are those in memory, where tiles are padded: on a TPU an
array of 100 x 3 bfloat16 takes as much memory as one of 104 x 128.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e4m3b11fnuz", "f8e8m0fnu"), 1.0),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2.0),
    **dict.fromkeys(("f32", "s32", "u32"), 4.0),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 8.0),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 0.5),
    **dict.fromkeys(("s2", "u2"), 0.25),
}
HBM, VMEM, SYNC, HOST = 0, 1, 2, 5  # memory spaces: S(n) in a layout; a layout without it is in HBM

_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r":T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-<>]+) ")
_OUTER = re.compile(r"(?:ENTRY )?%[\w.\-<>]+ \(.*\{$|HloModule |\}(?:, execution_thread=.*)?$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-<>]+) = ")
_NAME = re.compile(r"%([\w.\-<>]+(?:#\d+)*)")
_PARENTHESIS = re.compile(r"[()]")
_DEPTH = re.compile(r"[(){}\[\],]")
# The tables before the first computation: the lines of code that the instructions come from.
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """One array: its type, logical dimensions, memory space, and size there."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    size_bytes: float  # with the padding of tiles

    @property
    def content_bytes(self) -> int:
        """Size without the padding of tiles."""
        return math.ceil(math.prod(self.dims) * ITEM_BYTES[self.dtype])


@dataclass(slots=True)
class Instruction:
    """One instruction: `name = shape op(operands), attributes`."""

    name: str
    op: str
    shapes: tuple[Shape, ...]  # the arrays of its result, nested tuples flattened
    operands: tuple[str, ...]
    literal: str  # text between the parentheses: a parameter's number, a constant's value; empty for other operations
    attributes: str
    is_root: bool
    index: int | None = None  # of a get-tuple-element
    shape_text: str = ""

    def attribute(self, name: str) -> str | None:
        """Return the computation that an attribute names (`calls`, `body`, `condition`, `to_apply`), or None."""
        found = re.search(rf"\b{name}=%?([\w.\-<>]+)", self.attributes)
        return found[1] if found else None

    @property
    def size_bytes(self) -> float:
        return sum(shape.size_bytes for shape in self.shapes)

    def bytes_in(self, space: int) -> float:
        """Return the size of the result's arrays in one memory space."""
        return sum(shape.size_bytes for shape in self.shapes if shape.space == space)

    def element(self, index: int) -> str:
        """Return the shape of one element of a tuple, as text."""
        return _elements(self.shape_text)[index]

    def op_name(self) -> str:
        """Return the place in the model that the instruction comes from, as JAX names it; empty if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(slots=True)
class Computation:
    """A list of instructions: the entry, the body of a loop, the contents of a fusion, and so on."""

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
        """Return the instruction that is operand `number`, or None if it does not exist."""
        names = instruction.operands
        return self.by_name.get(names[number]) if number < len(names) else None

    def parameters(self) -> dict[int, Instruction]:
        """Return the parameters by number."""
        return {int(x.literal): x for x in self.instructions if x.op == "parameter"}


@dataclass
class Module:
    """A parsed program. `entry` is the name of the computation that runs first."""

    computations: dict[str, Computation]
    entry: str
    lines: dict[int, tuple[str, int]] = field(default_factory=dict)  # stack frame -> (file, line number)

    def source(self, instruction: Instruction) -> tuple[str, int] | None:
        """Return the file and the line number of the Python code that an instruction comes from, or None."""
        if found := re.search(r"stack_frame_id=(\d+)", instruction.attributes):
            return self.lines.get(int(found[1]))
        found = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return (found[1], int(found[2])) if found else None

    @cached_property
    def users(self) -> dict[tuple[str, str], list[tuple[Instruction, int]]]:
        """The users of each value: (computation, name) -> list of (instruction that reads it, operand number)."""
        table: dict[tuple[str, str], list[tuple[Instruction, int]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for number, name in enumerate(instruction.operands):
                    table.setdefault((computation.name, name), []).append((instruction, number))
        return table


@lru_cache(maxsize=1 << 14)  # the same shapes occur thousands of times in a program
def shapes_in(text: str) -> tuple[Shape, ...]:
    """Return all arrays of a (possibly nested) shape, in order."""
    return tuple(_shape(dtype, dims, layout) for dtype, dims, layout in _SHAPE.findall(text) if dtype in ITEM_BYTES)


@lru_cache(maxsize=1 << 14)
def _shape(dtype: str, dims_text: str, layout: str) -> Shape:
    """Return an array's shape. Its size has the minor dimensions rounded up to multiples of the layout's tile."""
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
    """Parse the text of an HLO module."""
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in _instruction_lines(text):
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
    return Module(computations, entry, _frame_lines(text))


def _frame_lines(text: str) -> dict[int, tuple[str, int]]:
    """Return the file and the line number of each stack frame, from the tables before the first computation."""
    tables: dict[str, list[str]] = {}
    title = ""
    for line in text.partition("\n%")[0].splitlines():
        if line[:1].isdigit():
            tables.setdefault(title, []).append(line)
        else:
            title = line.strip()
    files = {int(found[1]): found[2] for line in tables.get("FileNames", ()) if (found := _FILE.match(line))}
    locations = {
        int(found[1]): (files.get(int(found[2]), ""), int(found[3]))
        for line in tables.get("FileLocations", ())
        if (found := _LOCATION.match(line))
    }
    frames = (found for line in tables.get("StackFrames", ()) if (found := _FRAME.match(line)))
    return {int(found[1]): locations[int(found[2])] for found in frames if int(found[2]) in locations}


def _instruction_lines(text: str) -> Iterator[str]:
    """Yield one line per instruction. A Pallas kernel spans several lines, one of which begins with `}}`."""
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
    """Parse a line. `found` is the match of its beginning, up to the `=`."""
    start = found.end()
    shape_end = _closing_parenthesis(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", shape_end)
    closing = _closing_parenthesis(line, opening)
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
    """Add a get-tuple-element for an operand such as `%tuple#2`.

    Newer compilers use this short form. Older ones write a separate get-tuple-element, which the model expects.
    """
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
    """Return the elements of a tuple's shape: split it at commas outside of inner brackets."""
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


def _closing_parenthesis(text: str, opening: int) -> int:
    """Return the position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"no closing parenthesis in {text[:200]!r}")
