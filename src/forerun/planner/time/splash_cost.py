"""The time of one splash attention kernel. The compiled program has no cycle estimate for such a kernel.

The cycles per block were counted in the compiler's final VLIW code. The matrix unit may need more cycles than the code
has bundles, because a core waits if it gives the unit work too fast. So the larger of both counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forerun.planner.hlo import Computation, Instruction
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.splash_cycles import block_cycles

# Number of S x S x D matmuls per kernel and pair of blocks.
MATMULS = {"forward": 2, "dq": 3, "dkv": 4, "backward": 5}
BLOCK_KEYS = {"fwd": "block_q", "dkv": "block_q_dkv", "dq": "block_q_dq"}  # in a kernel's metadata


@dataclass(frozen=True)
class KernelShape:
    """The kind and dimensions of a splash kernel."""

    kind: str  # a key of MATMULS
    batch: int
    heads: int
    sequence: int
    keys: int
    head: int
    block: int
    table: tuple[int, int] | None = None  # rows and columns of the kernel's table of blocks

    @property
    def programs(self) -> int:
        return self.batch * self.heads

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return max(1, self.sequence // self.block)

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return max(1, self.keys // self.block)

    @property
    def by_keys(self) -> bool:
        """Whether the kernel goes through the blocks of queries for each block of keys."""
        return self.kind in ("dkv", "backward")

    @property
    def visits(self) -> int:
        """Visited blocks of one program, with and without work."""
        if self._table_of_part is None:
            return self.rows * self.columns
        rows, columns = self._table_of_part
        return rows * self.columns if self.by_keys else self.rows * columns

    @property
    def computed(self) -> float:
        """Blocks of one program with work.

        Without a window, these are the blocks on and below the diagonal. A device of the context axis has an early and
        a late chunk of the queries, which together see as many keys as two chunks in the middle (`nn/context.py`).
        """
        if (part := self._table_of_part) is not None:
            if not self.by_keys and part[1] < self.columns:
                return float(self.rows * part[1])
            if self.by_keys and part[0] < self.rows:  # each chunk has half of the rows
                return self.rows * part[0] / 2
        return self.rows * (self.columns + 1) / 2

    @property
    def share_visited(self) -> float:
        """Share of the blocks that the kernel computes."""
        return self.computed / (self.rows * self.columns)

    @property
    def _table_of_part(self) -> tuple[int, int] | None:
        """The table, if the kernel has the queries of a part of the sequence."""
        return self.table if self.sequence != self.keys else None

    @property
    def flops(self) -> float:
        return 2.0 * MATMULS[self.kind] * self.programs * self.sequence * self.keys * self.head * self.share_visited


def kernel_shape(computation: Computation, x: Instruction) -> KernelShape | None:
    """Return the shape of the splash kernel that `x` calls, or None if it calls another kernel."""
    found = re.search(r"splash_m[hq]a_(fwd|dq|dkv)", x.name)
    if found is None:
        return None
    arrays = [
        shape
        for name in x.operands
        if (operand := computation.by_name.get(name))
        for shape in operand.shapes
        if shape.dtype in ("bf16", "f32") and len(shape.dims) >= 3
    ]
    if len(arrays) < 2:
        return None
    tables = [
        (shape.dims[1], shape.dims[2])
        for name in x.operands[:1]
        if (operand := computation.by_name.get(name))
        for shape in operand.shapes
        if len(shape.dims) == 3 and shape.dims[0] == 1
    ]
    query, key = arrays[0].dims, arrays[1].dims
    large = [s.dims for s in x.shapes if len(s.dims) >= len(query)]  # scratch has no heads dimension
    # A dkv kernel with three outputs (dq, dk, dv) is the fused backward kernel.
    outputs = sum(dims[-1] == query[-1] and dims[-2] in (query[-2], key[-2]) for dims in large)
    kind = {"fwd": "forward", "dq": "dq", "dkv": "backward" if outputs >= 3 else "dkv"}[found[1]]
    block = _block(x, BLOCK_KEYS[found[1]], query[-2])
    table = tables[0] if tables else None
    return KernelShape(kind, math.prod(query[:-3]), query[-3], query[-2], key[-2], query[-1], block, table)


def _block(x: Instruction, key: str, sequence: int) -> int:
    """Return the block size of the queries, from the kernel's metadata or the length of its float32 scratch."""
    if found := re.search(rf"\b{key}\W+(\d+)", x.attributes):
        return int(found[1])
    scratch = [s.dims[-2] for s in x.shapes if s.dtype == "f32" and len(s.dims) >= 2 and s.dims[-1] % 128 == 0]
    return min([*(n for n in scratch if n >= 128), sequence])


def kernel_seconds(machine: ChipModel, chip: str, shape: KernelShape) -> float:
    """Return the time of a splash kernel: that of the core with the most blocks."""
    share = busiest_share(machine.cores, shape)
    matrix_seconds = share * padded_flops(machine, shape) / (machine.matmul_flops / machine.cores)
    counted = block_cycles(chip, shape.head, shape.block, shape.kind)
    if counted is None:
        return matrix_seconds / machine.matmul_share / machine.attention_share
    programs = share * shape.programs
    lines = shape.columns if shape.by_keys else shape.rows
    overhead = programs * (shape.visits * counted.visit + lines * counted.per_row) / machine.clock_hz
    computing = programs * shape.computed * counted.main / machine.clock_hz
    return (max(computing, matrix_seconds) + overhead) / machine.attention_share


def padded_flops(machine: ChipModel, shape: KernelShape) -> float:
    """Return the FLOPs of the kernel with its head padded to the width of the matrix unit.

    Each of its matrix multiplications contracts over the head or has it as its result's width.
    """
    width = machine.matrix_unit * math.ceil(shape.head / machine.matrix_unit)
    return shape.flops * width / shape.head


def busiest_share(cores: int, shape: KernelShape) -> float:
    """Return the share of the kernel's blocks that the busiest core of a device visits.

    The compiler splits one parallel dimension, as evenly as it can: the batch, or the heads of the forward kernel. The
    limits of the loops in the dumped code show it.
    """
    dimensions = (shape.batch, shape.heads) if shape.kind == "forward" else (shape.batch,)
    return min(math.ceil(size / cores) / size for size in dimensions)
