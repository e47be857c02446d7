"""The time of a matrix multiplication of cuBLAS.

The result is divided into tiles. Each SM computes one tile at a time, so the time is a number of waves: the last wave
takes as long as the others, even if it has few tiles. cuBLAS chooses the tile and may split K over several SMs. Here
the fastest choice counts. The simulation also counts the transfer of the operands and the result.
"""

from __future__ import annotations

import math

from forerun.planner.hlo import ITEM_BYTES
from forerun.planner.time.gemm_shape import GemmShape
from forerun.planner.time.gpu.gpu_model import GpuModel

SPLITS = (1, 2, 4, 8, 16)
# Smaller tiles load more operands per FLOP. Their rate relative to the largest tile: assumed, 2026-11.
SMALLER_TILES = ((1, 1, 1.0), (1, 2, 0.93), (2, 2, 0.82), (2, 4, 0.65))
# Filling the pipeline and writing the tile takes as long as this many elements of K.
START_K = 64
EIGHT_BITS = ("f8e4m3fn", "f8e5m2", "f8e4m3", "s8", "u8")


def gemm_seconds(model: GpuModel, gemm: GemmShape) -> float:
    """Return the time of the arithmetic of a gemm, without the start of its kernel and the transfer of its data."""
    return min(
        _tiled_seconds(model, gemm, (max(16, model.tile[0] // rows), max(16, model.tile[1] // columns)), share, split)
        for rows, columns, share in SMALLER_TILES
        for split in SPLITS
        if split == 1 or gemm.k // split >= 2 * START_K
    )


def rate(model: GpuModel, gemm: GemmShape) -> float:
    """Return the FLOP/s of a large gemm with operands of this type."""
    if gemm.operand in EIGHT_BITS:
        return model.fp8_flops
    return model.gemm_flops if ITEM_BYTES[gemm.operand] <= 2 else model.fp32_flops


def _tiled_seconds(model: GpuModel, gemm: GemmShape, tile: tuple[int, int], share: float, split: int) -> float:
    """Return the time with one tile size, and with K split into `split` parts that are added afterwards."""
    best = math.inf
    for rows, columns in {tile, tile[::-1]}:
        tiles = gemm.batch * math.ceil(gemm.m / rows) * math.ceil(gemm.n / columns) * split
        waves = math.ceil(tiles / model.cores)
        depth = math.ceil(gemm.k / split) + START_K
        seconds = waves * 2.0 * rows * columns * depth / (rate(model, gemm) * share / model.cores)
        best = min(best, seconds)
    if split > 1:  # write and read the partial sums, which are float32
        best += 2 * split * gemm.batch * gemm.m * gemm.n * 4 / model.l2_bytes_per_second
    return best
