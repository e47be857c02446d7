"""The time of one splash attention kernel. The compiled program has no cycle estimate for such a kernel.

For some shapes, cycles per block were counted in the compiler's final VLIW code. For others, the time is the kernel's
FLOPs at the share of peak that counted shapes reach.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forerun.planner.hlo import Computation, Instruction
from forerun.planner.time.chip_model import ChipModel


@dataclass(frozen=True)
class BlockCycles:
    """Counted cycles of a causal kernel, which visits nb x nb blocks. About half of them hold work."""

    main: int  # of a block with work
    per_row: int  # at the begin and end of a row of blocks
    visit: int  # of every block, including skipped ones


# By (chip, head, block, kernel). A device of v4 and v5p has two cores. Both share the forward kernel, while dq and dkv
# run on one of them, as the loops of the dumped code show. No count is below the cycles that the matrix unit needs.
COUNTED: dict[tuple[str, int, int, str], BlockCycles] = {
    ("v6e", 128, 2048, "forward"): BlockCycles(15490, 1362, 330),
    ("v6e", 128, 2048, "backward"): BlockCycles(22971, 700, 280),
    ("v6e", 128, 2048, "dq"): BlockCycles(14808, 200, 270),
    ("v6e", 128, 2048, "dkv"): BlockCycles(17872, 500, 350),
    ("v6e", 128, 512, "forward"): BlockCycles(934, 420, 180),
    ("v6e", 128, 512, "dq"): BlockCycles(1084, 130, 130),
    ("v6e", 128, 512, "dkv"): BlockCycles(1314, 240, 160),
    ("v5e", 128, 512, "forward"): BlockCycles(1188, 685, 190),
    ("v5e", 128, 512, "dq"): BlockCycles(1536, 160, 130),
    ("v5e", 128, 512, "dkv"): BlockCycles(2048, 330, 160),
    ("v5p", 128, 512, "forward"): BlockCycles(580, 606, 197),
    ("v5p", 128, 512, "dq"): BlockCycles(1536, 362, 314),
    ("v5p", 128, 512, "dkv"): BlockCycles(2048, 674, 361),
    ("v4", 128, 512, "forward"): BlockCycles(855, 842, 200),
    ("v4", 128, 512, "dq"): BlockCycles(1935, 503, 436),
    ("v4", 128, 512, "dkv"): BlockCycles(2688, 1030, 334),
    ("v4", 256, 512, "forward"): BlockCycles(1506, 1077, 180),
    ("v4", 256, 512, "dq"): BlockCycles(3548, 902, 420),
    ("v4", 256, 512, "dkv"): BlockCycles(4388, 1654, 306),
    ("tpu7x", 128, 512, "forward"): BlockCycles(930, 70, 208),
    ("tpu7x", 128, 512, "dq"): BlockCycles(1050, 219, 131),
    ("tpu7x", 128, 512, "dkv"): BlockCycles(1300, 377, 181),
}
# Number of S x S x D matmuls per kernel and pair of blocks.
MATMULS = {"forward": 2, "dq": 3, "dkv": 4, "backward": 5}
BLOCK_KEYS = {"fwd": "block_q", "dkv": "block_q_dkv", "dq": "block_q_dq"}  # in a kernel's metadata
# Share of peak for shapes that were not counted: the share that counted blocks reach on long sequences.
SHARE = {
    "v4": {"forward": 0.41, "dq": 0.27, "dkv": 0.30, "backward": 0.32},
    "v5e": {"forward": 0.65, "dq": 0.86, "dkv": 0.86, "backward": 0.86},
    "v5p": {"forward": 0.53, "dq": 0.35, "dkv": 0.37, "backward": 0.39},
    "v6e": {"forward": 0.27, "dq": 0.42, "dkv": 0.46, "backward": 0.45},
    "tpu7x": {"forward": 0.16, "dq": 0.25, "dkv": 0.27, "backward": 0.30},
}


@dataclass(frozen=True)
class KernelShape:
    """The kind and dimensions of a splash kernel."""

    kind: str  # a key of MATMULS
    programs: int  # batch x heads
    sequence: int
    keys: int
    head: int
    block: int

    @property
    def share_visited(self) -> float:
        """Share of the blocks that a causal kernel computes: those on and below the diagonal."""
        blocks = max(1, self.sequence // self.block)
        return (blocks + 1) / (2 * blocks)

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
    query, key = arrays[0].dims, arrays[1].dims
    large = [s.dims for s in x.shapes if len(s.dims) >= len(query)]  # scratch has no heads dimension
    # A dkv kernel with three outputs (dq, dk, dv) is the fused backward kernel.
    outputs = sum(dims[-1] == query[-1] and dims[-2] in (query[-2], key[-2]) for dims in large)
    kind = {"fwd": "forward", "dq": "dq", "dkv": "backward" if outputs >= 3 else "dkv"}[found[1]]
    block = _block(x, BLOCK_KEYS[found[1]], query[-2])
    return KernelShape(kind, math.prod(query[:-2]), query[-2], key[-2], query[-1], block)


def _block(x: Instruction, key: str, sequence: int) -> int:
    """Return the block size of the queries, from the kernel's metadata or the length of its float32 scratch."""
    if found := re.search(rf"\b{key}\W+(\d+)", x.attributes):
        return int(found[1])
    scratch = [s.dims[-2] for s in x.shapes if s.dtype == "f32" and len(s.dims) >= 2 and s.dims[-1] % 128 == 0]
    return min([*(n for n in scratch if n >= 128), sequence])


def kernel_seconds(machine: ChipModel, chip: str, shape: KernelShape) -> float:
    """Return the time of a splash kernel, from counted cycles if the shape was counted, else from its FLOPs."""
    counted = COUNTED.get((chip, shape.head, shape.block, shape.kind))
    if counted is None:
        shares = SHARE[chip]
        lanes = max(1.0, 128 / shape.head)  # a head narrower than 128 takes as long as one of 128
        return shape.flops * lanes / machine.matmul_flops / shares[shape.kind] / machine.attention_share
    rows, columns = max(1, shape.sequence // shape.block), max(1, shape.keys // shape.block)
    per_block = counted.visit + shape.share_visited * counted.main + counted.per_row / columns
    cycles = shape.programs * rows * columns * per_block
    return max(cycles / machine.clock_hz, shape.flops / machine.matmul_flops) / machine.attention_share
