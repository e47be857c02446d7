"""The work of one matrix multiplication: its dimensions, its FLOPs, and the FLOPs that a matrix unit spends on it.

XLA's GPU compiler calls cuBLAS for most products. The TPU compiler writes every matrix multiplication as a convolution,
and may put batch, free and contracted dimensions into its window.

A matrix unit holds a square tile of one operand and multiplies rows of the other one by it. So the tile's two
dimensions are padded to the unit. Loading a tile takes as long as half of the unit's rows (counted in dumped code of
v5e: 58 to 77 cycles for 128 x 128), so fewer rows per tile take that long, too. The compiler chooses which operand is
held.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forerun.planner.hlo import ITEM_BYTES, Computation, Instruction

# Passes over bfloat16 parts of a float32 operand, for each precision that a program can ask for.
PASSES = {"high": 3, "highest": 6}
ROW_TILE = 8  # rows of a vector register
# Targets: __cublas$gemm, __cublas$lt$matmul, and with $f8 or $mx for 8-bit operands.
CUBLAS = re.compile(r'custom_call_target="__cublas\$')
# Kernels of products of groups of rows.
PRODUCT, OUTER, METADATA = "ragged-dot-none", "tgmm", "ragged-dot-metadata"
FLOATS = ("bf16", "f16", "f32")
DEFAULT_ROWS = 512  # rows of a tile in the kernel of the gradient


@dataclass(frozen=True)
class MatrixProduct:
    """`batch` products of an m x k and a k x n matrix."""

    batch: int
    m: int
    n: int
    k: int
    operand: str = "bf16"  # dtype of the wider operand
    passes: int = 1

    @property
    def flops(self) -> float:
        """FLOPs, two per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def eight_bits(self) -> bool:
        """Whether both operands have elements of 8 bits."""
        return ITEM_BYTES[self.operand] <= 1

    def unit_flops(self, unit: int, eight_bit_speed: float = 1.0) -> float:
        """Return the FLOPs of matrix units of `unit` x `unit` elements, with those that padding wastes.

        They are FLOPs of bfloat16: a product of 8-bit operands, which is `eight_bit_speed` times as fast, has fewer.
        """
        least, rows = unit // 2, min(unit, ROW_TILE)
        held_right = _padded(self.n, unit) * max(_padded(self.m, rows), least)
        held_left = _padded(self.m, unit) * max(_padded(self.n, rows), least)
        padded = 2.0 * self.batch * _padded(self.k, unit) * min(held_left, held_right)
        return self.passes * max(self.flops, padded) / (eight_bit_speed if self.eight_bits else 1.0)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def is_cublas_call(x: Instruction) -> bool:
    return x.op == "custom-call" and CUBLAS.search(x.attributes) is not None


def dot_product(computation: Computation, x: Instruction) -> MatrixProduct | None:
    """Return the product of a `dot` or of a call of cuBLAS, or None for others and if an operand is unknown."""
    left, right = computation.operand(x, 0), computation.operand(x, 1)
    if (x.op != "dot" and not is_cublas_call(x)) or left is None or right is None:
        return None
    contracted, batch = _dims(x, "lhs_contracting"), _dims(x, "lhs_batch")
    lhs = left.shapes[0].dims
    k, rows = math.prod(lhs[d] for d in contracted), math.prod(lhs[d] for d in batch)
    m = math.prod(size for d, size in enumerate(lhs) if d not in contracted and d not in batch)
    n = math.prod(x.shapes[0].dims) // max(1, rows * m)
    return MatrixProduct(rows, m, n, k, _operand(left, right), _passes(x))


def convolution_product(computation: Computation, x: Instruction) -> MatrixProduct | None:
    """Return the product that a convolution computes, or None if an operand is unknown."""
    left, right = computation.operand(x, 0), computation.operand(x, 1)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    if left is None or right is None or labels is None:
        return None
    lhs, rhs, out = labels[1], labels[2], labels[3]
    lengths, results = left.shapes[0].dims, x.shapes[0].dims
    window = _Window(x.attributes, sum(letter.isdigit() for letter in lhs))
    groups = re.search(r"batch_group_count=(\d+)", x.attributes)
    batch, m = 1, lengths[lhs.index("b")] // (int(groups[1]) if groups else 1)
    n, k = results[out.index("f")], right.shapes[0].dims[rhs.index("i")]
    for dim in range(window.dims):
        length, outputs = lengths[lhs.index(str(dim))], results[out.index(str(dim))]
        # Padding of the window is no work.
        pairs = window.valid_pairs(dim, length, outputs)
        if window.size[dim] == 1:
            m *= pairs
        elif length == 1:
            n *= pairs
        elif outputs == 1:
            k *= pairs
        else:
            batch *= pairs  # the usual form of a batch dimension; for a true convolution, only `flops` is exact
    return MatrixProduct(batch, m, n, k, _operand(left, right), _passes(x))


def _dims(x: Instruction, role: str) -> tuple[int, ...]:
    """Return dimension numbers, from the attributes of a `dot` or the configuration of a call."""
    found = re.search(rf'\b{role}_dims=\{{([\d,]*)\}}|"{role}_dimensions":\[([^\]]*)\]', x.attributes)
    return tuple(int(number) for number in re.findall(r"\d+", (found[1] or found[2] or "") if found else ""))


def _passes(x: Instruction) -> int:
    found = re.search(r"operand_precision=\{(\w+),(\w+)\}", x.attributes)
    return max(PASSES.get(found[1], 1), PASSES.get(found[2], 1)) if found else 1


def _operand(left: Instruction, right: Instruction) -> str:
    """Return the dtype of the wider operand."""
    return max((x.shapes[0].dtype for x in (left, right)), key=lambda dtype: ITEM_BYTES[dtype])


class _Window:
    """The `window={size=.. stride=.. pad=.. lhs_dilate=.. rhs_dilate=..}` of a convolution."""

    def __init__(self, attributes: str, dims: int) -> None:
        self.dims = dims
        found = re.search(r"window=\{([^}]*)\}", attributes)
        text = found[1] if found else ""

        def values(key: str, default: str) -> list[str]:
            match = re.search(rf"\b{key}=(\S+)", text)
            return match[1].split("x") if match else [default] * dims

        self.size = [int(v) for v in values("size", "1")]
        self.stride = [int(v) for v in values("stride", "1")]
        self.before = [int(v.split("_")[0]) for v in values("pad", "0_0")]
        self.spread = [int(v) for v in values("lhs_dilate", "1")]
        self.reach = [int(v) for v in values("rhs_dilate", "1")]

    def valid_pairs(self, dim: int, length: int, outputs: int) -> int:
        """Return the number of (output, tap) pairs along one dimension that fall on data and not on padding."""
        spread, stride = self.spread[dim], self.stride[dim]
        extent = (length - 1) * spread + 1
        pairs = 0
        for tap in range(self.size[dim]):
            offset = tap * self.reach[dim] - self.before[dim]
            if spread == 1 and stride == 1:
                pairs += max(0, min(outputs - 1, length - 1 - offset) - max(0, -offset) + 1)
            else:
                places = range(offset, offset + outputs * stride, stride)
                pairs += sum(0 <= place < extent and place % spread == 0 for place in places)
        return pairs


@dataclass(frozen=True)
class GroupedShape:
    """`groups` products: [rows of a group, inputs] x [inputs, outputs], or the transposed rows for a gradient.

    On a TPU, the compiler makes a kernel of each `ragged_dot`. The gradient of the weights is a Pallas kernel, `tgmm`.
    A third kernel computes where each group starts, from the numbers of rows, and takes no time.

    A group may start inside a tile of rows, which the kernel then visits once for each of its groups. So there are up
    to as many more tiles as there are groups, and a tile takes the full time even if it has few rows of its group.
    """

    groups: int
    rows: int  # of all groups
    inputs: int
    outputs: int
    tile: int  # rows

    @property
    def flops(self) -> float:
        """FLOPs, two per multiply-add, without those of rows that belong to another group of their tile."""
        return 2.0 * self.rows * self.inputs * self.outputs

    def unit_flops(self, unit: int) -> float:
        """Return the FLOPs of matrix units of `unit` x `unit` elements, with those that padding and tiles waste."""
        tiles = -(-self.rows // self.tile) + self.groups - 1
        return MatrixProduct(tiles, self.tile, self.outputs, self.inputs).unit_flops(unit)


def is_metadata(x: Instruction) -> bool:
    """Return whether `x` computes where each group starts."""
    return x.name.startswith(METADATA)


def grouped_shape(computation: Computation, x: Instruction) -> GroupedShape | None:
    """Return the shape of the grouped product that `x` calls, or None if it calls another kernel."""
    if not x.name.startswith((PRODUCT, OUTER)) or not x.shapes:
        return None
    operands = (computation.by_name.get(name) for name in x.operands)
    shapes = (shape for operand in operands if operand for shape in operand.shapes)
    arrays = [shape.dims for shape in shapes if shape.dtype in FLOATS and len(shape.dims) in (2, 3)]
    result = x.shapes[0].dims
    if len(arrays) < 2 or len(arrays[0]) != 2:
        return None
    rows = arrays[0][0]
    if x.name.startswith(OUTER):
        return (
            GroupedShape(result[0], rows, result[1], result[2], min(DEFAULT_ROWS, rows)) if len(result) == 3 else None
        )
    if len(arrays[1]) != 3:
        return None
    tiling = re.search(r'ragged_dot_tiling="(\d+),', x.attributes)
    return GroupedShape(arrays[1][0], rows, arrays[0][1], result[-1], int(tiling[1]) if tiling else DEFAULT_ROWS)
