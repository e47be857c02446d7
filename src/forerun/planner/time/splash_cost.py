"""The time of one splash attention kernel. The compiled program has no cycle estimate for such a kernel.

The cycles per block were counted in the compiler's final VLIW code: `bench/kernel_cycles.py` counts them, and its
results are in `bench/results/kernel_cycles.json`. The matrix unit may need more cycles than the code has bundles,
because a core waits if it gives the unit work too fast. So the larger of both counts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from forerun.planner.hlo import Computation, Instruction
from forerun.planner.time.chip_model import ChipModel

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


@dataclass(frozen=True)
class BlockCycles:
    """Counted cycles of one core, per block of queries and keys. About half of a causal kernel's blocks have work."""

    main: int  # of a block with work
    per_row: int  # at the begin and end of a row of blocks
    visit: int  # of every block, including skipped ones


LANES = 128  # a narrower head is padded to as many lanes
# By (chip, head, block, kernel).
COUNTED: dict[tuple[str, int, int, str], BlockCycles] = {
    ("v4", 64, 512, "forward"): BlockCycles(1731, 994, 473),
    ("v4", 64, 512, "dq"): BlockCycles(1947, 192, 486),
    ("v4", 64, 512, "dkv"): BlockCycles(2726, 618, 385),
    ("v4", 128, 512, "forward"): BlockCycles(1710, 975, 473),
    ("v4", 128, 512, "dq"): BlockCycles(1935, 175, 486),
    ("v4", 128, 512, "dkv"): BlockCycles(2688, 602, 385),
    ("v4", 256, 512, "forward"): BlockCycles(3012, 1151, 471),
    ("v4", 256, 512, "dq"): BlockCycles(3548, 367, 481),
    ("v4", 256, 512, "dkv"): BlockCycles(4388, 985, 380),
    ("v5e", 64, 512, "forward"): BlockCycles(1213, 699, 155),
    ("v5e", 64, 512, "dq"): BlockCycles(1519, 198, 137),
    ("v5e", 64, 512, "dkv"): BlockCycles(1989, 390, 161),
    ("v5e", 64, 512, "backward"): BlockCycles(2436, 390, 223),
    ("v5e", 128, 128, "forward"): BlockCycles(248, 171, 154),
    ("v5e", 128, 128, "dq"): BlockCycles(248, 44, 135),
    ("v5e", 128, 128, "dkv"): BlockCycles(242, 84, 163),
    ("v5e", 128, 256, "forward"): BlockCycles(531, 348, 155),
    ("v5e", 128, 256, "dq"): BlockCycles(505, 84, 137),
    ("v5e", 128, 256, "dkv"): BlockCycles(725, 164, 161),
    ("v5e", 128, 512, "forward"): BlockCycles(1207, 690, 155),
    ("v5e", 128, 512, "dq"): BlockCycles(1471, 164, 137),
    ("v5e", 128, 512, "dkv"): BlockCycles(1881, 326, 161),
    ("v5e", 128, 512, "backward"): BlockCycles(2450, 326, 223),
    ("v5e", 256, 512, "forward"): BlockCycles(2178, 843, 158),
    ("v5e", 256, 512, "dq"): BlockCycles(2930, 326, 140),
    ("v5e", 256, 512, "dkv"): BlockCycles(3748, 646, 166),
    ("v5p", 64, 512, "forward"): BlockCycles(1187, 704, 420),
    ("v5p", 64, 512, "dq"): BlockCycles(1549, 198, 201),
    ("v5p", 64, 512, "dkv"): BlockCycles(1964, 390, 395),
    ("v5p", 128, 128, "forward"): BlockCycles(248, 173, 284),
    ("v5p", 128, 128, "dq"): BlockCycles(241, 44, 196),
    ("v5p", 128, 128, "dkv"): BlockCycles(239, 84, 289),
    ("v5p", 128, 256, "forward"): BlockCycles(528, 351, 350),
    ("v5p", 128, 256, "dq"): BlockCycles(507, 84, 202),
    ("v5p", 128, 256, "dkv"): BlockCycles(729, 164, 290),
    ("v5p", 128, 512, "forward"): BlockCycles(1160, 693, 350),
    ("v5p", 128, 512, "dq"): BlockCycles(1505, 164, 201),
    ("v5p", 128, 512, "dkv"): BlockCycles(1870, 326, 292),
    ("v5p", 128, 512, "backward"): BlockCycles(2383, 326, 440),
    ("v5p", 256, 512, "forward"): BlockCycles(2150, 846, 354),
    ("v5p", 256, 512, "dq"): BlockCycles(3050, 326, 203),
    ("v5p", 256, 512, "dkv"): BlockCycles(3828, 646, 295),
    ("v6e", 64, 1024, "forward"): BlockCycles(3770, 702, 175),
    ("v6e", 64, 1024, "backward"): BlockCycles(6043, 516, 281),
    ("v6e", 64, 2048, "forward"): BlockCycles(15767, 1308, 240),
    ("v6e", 64, 2048, "backward"): BlockCycles(23562, 1021, 479),
    ("v6e", 128, 128, "forward"): BlockCycles(224, 78, 174),
    ("v6e", 128, 128, "backward"): BlockCycles(315, 45, 185),
    ("v6e", 128, 256, "forward"): BlockCycles(563, 162, 175),
    ("v6e", 128, 256, "backward"): BlockCycles(786, 85, 188),
    ("v6e", 128, 512, "forward"): BlockCycles(934, 340, 175),
    ("v6e", 128, 512, "dq"): BlockCycles(1084, 130, 130),
    ("v6e", 128, 512, "dkv"): BlockCycles(1314, 240, 160),
    ("v6e", 128, 512, "backward"): BlockCycles(1585, 165, 204),
    ("v6e", 128, 1024, "forward"): BlockCycles(3717, 696, 213),
    ("v6e", 128, 1024, "backward"): BlockCycles(5992, 325, 304),
    ("v6e", 128, 2048, "forward"): BlockCycles(15497, 1303, 240),
    ("v6e", 128, 2048, "dq"): BlockCycles(14808, 200, 270),
    ("v6e", 128, 2048, "dkv"): BlockCycles(17872, 500, 350),
    ("v6e", 128, 2048, "backward"): BlockCycles(22975, 662, 480),
    ("v6e", 256, 1024, "forward"): BlockCycles(3730, 829, 245),
    ("v6e", 256, 1024, "backward"): BlockCycles(6116, 662, 417),
    ("v6e", 256, 2048, "forward"): BlockCycles(15013, 1596, 371),
    ("v6e", 256, 2048, "backward"): BlockCycles(23469, 1366, 520),
    ("tpu7x", 64, 512, "forward"): BlockCycles(931, 336, 179),
    ("tpu7x", 64, 512, "dq"): BlockCycles(1064, 89, 142),
    ("tpu7x", 64, 512, "dkv"): BlockCycles(1303, 185, 176),
    ("tpu7x", 128, 512, "forward"): BlockCycles(929, 326, 179),
    ("tpu7x", 128, 512, "dq"): BlockCycles(1049, 73, 142),
    ("tpu7x", 128, 512, "dkv"): BlockCycles(1300, 153, 176),
    ("tpu7x", 128, 512, "backward"): BlockCycles(1545, 153, 201),
    ("tpu7x", 256, 512, "forward"): BlockCycles(1370, 405, 243),
    ("tpu7x", 256, 512, "dq"): BlockCycles(1195, 154, 179),
    ("tpu7x", 256, 512, "dkv"): BlockCycles(1381, 313, 279),
}


def block_cycles(chip: str, head: int, block: int, kind: str) -> BlockCycles | None:
    """Return the cycles of a kernel, or None for a chip without counted kernels.

    If the shape was not counted, the nearest counted one is scaled: the work of a block grows with its area and with
    the lanes of a head, and the work of a row with its length.
    """
    found = COUNTED.get((chip, head, block, kind))
    if found is not None:
        return found
    shapes = [(h, b) for c, h, b, k in COUNTED if (c, k) == (chip, kind)]
    if not shapes:
        return _fused(chip, head, block) if kind == "backward" else None
    lanes = LANES * math.ceil(head / LANES)
    nearest = min(shapes, key=lambda shape: (abs(math.log(shape[0] / lanes)), abs(math.log(shape[1] / block))))
    known = COUNTED[(chip, *nearest, kind)]
    length = block / nearest[1]
    wider = max(1.0, lanes / max(LANES, nearest[0]))
    return BlockCycles(
        main=round(known.main * length * length * wider), per_row=round(known.per_row * length), visit=known.visit
    )


def _fused(chip: str, head: int, block: int) -> BlockCycles | None:
    """Return the cycles of a fused backward kernel that was not counted.

    It has five of the seven matrix multiplications of the separate kernels, which both compute the scores and the
    gradient of the probabilities.
    """
    parts = [block_cycles(chip, head, block, kind) for kind in ("dq", "dkv")]
    if parts[0] is None or parts[1] is None:
        return None
    return replace(parts[1], main=round((parts[0].main + parts[1].main) * 5 / 7))
