"""The work of the kernels that multiply groups of rows by one matrix each: the experts of a model.

On a TPU, the compiler makes a kernel of each `ragged_dot`. The gradient of the weights is a Pallas kernel, `tgmm`. A
third kernel computes where each group starts, from the numbers of rows, and takes no time.

A group may start inside a tile of rows, which the kernel then visits once for each of its groups. So there are up to as
many more tiles as there are groups, and a tile takes the full time even if it has few rows of its group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.planner.hlo import Computation, Instruction
from forerun.planner.time.matrix_work import MatrixProduct

PRODUCT, OUTER, METADATA = "ragged-dot-none", "tgmm", "ragged-dot-metadata"
FLOATS = ("bf16", "f16", "f32")
DEFAULT_ROWS = 512  # rows of a tile in the kernel of the gradient


@dataclass(frozen=True)
class GroupedShape:
    """`groups` products: [rows of a group, inputs] x [inputs, outputs], or the transposed rows for a gradient."""

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
