"""The times of the libraries' kernels: matrix multiplications of cuBLAS, and cuDNN's fused attention.

A gemm: the result is divided into tiles. Each SM computes one tile at a time, so the time is a number of waves: the
last wave takes as long as the others, even if it has few tiles. cuBLAS chooses the tile and may split K over several
SMs. Here the fastest choice counts. The simulation also counts the transfer of the operands and the result.

Attention: the time is FLOPs divided by a rate that grows with the length of the sequence. A causal mask halves the
FLOPs. With packed rows, the lengths of the documents are unknown to the program, so each row counts as one document.
The time is then an upper bound.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forerun.planner.hlo import ITEM_BYTES, Computation, Instruction
from forerun.planner.time.execution import target_of
from forerun.planner.time.gpu.gpu_model import GpuModel
from forerun.planner.time.matrix_work import MatrixProduct

FUSED_ATTENTION = "__cudnn$fmha"
BACKWARD_FLOPS = 2.5  # backward / forward: five matrix products instead of two
# Sequence length at which half of the rate of long sequences is reached. Fits cuDNN in the FlashAttention-3 paper
# (arXiv 2407.08608, figure 5).
HALF_LENGTH, HALF_LENGTH_CAUSAL = 120, 500
# Rate by the size of a head, relative to 128, from the same figures.
HEAD_RATE = {64: 0.68, 96: 0.85, 128: 1.0, 192: 0.92, 256: 0.86}


@dataclass(frozen=True)
class AttentionShape:
    """The dimensions of one call of fused attention."""

    batch: int
    heads: int
    queries: int  # length of a row of queries
    keys: int
    head: int  # size of a head
    causal: bool
    window: int = 0  # 0: no window
    backward: bool = False

    @property
    def pairs(self) -> float:
        """Pairs of query and key in one row and head that the mask allows."""
        window = min(self.window, self.keys) if self.window else self.keys
        if not self.causal:
            return float(self.queries) * window
        # Query i sees min(i + 1, window) keys. The triangle at the start is half of a square.
        return self.queries * window - window * window / 2.0

    @property
    def flops(self) -> float:
        forward = 4.0 * self.batch * self.heads * self.head * self.pairs
        return forward * (BACKWARD_FLOPS if self.backward else 1.0)


def is_fused_attention(x: Instruction) -> bool:
    return x.op == "custom-call" and target_of(x).startswith(FUSED_ATTENTION)


def attention_shape(computation: Computation, x: Instruction) -> AttentionShape | None:
    """Return the dimensions of a call of cuDNN's fused attention, or None for other instructions.

    The configuration of the call has the shape of the scores: batch, heads, queries and keys. The last dimension of the
    first operand, the queries, is the size of a head.
    """
    query = computation.operand(x, 0)
    scores = re.search(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]', x.attributes)
    if not is_fused_attention(x) or query is None or scores is None:
        return None
    batch, heads, queries, keys = (int(number) for number in re.findall(r"\d+", scores[1]))
    mask = re.search(r'"mask_type":\s*"(\w+)"', x.attributes)
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', x.attributes)
    return AttentionShape(
        batch,
        heads,
        queries,
        keys,
        query.shapes[0].dims[-1],
        causal=mask is not None and "CAUSAL" in mask[1],
        window=int(window[1]) if window else 0,
        backward="Backward" in target_of(x),
    )


def attention_seconds(model: GpuModel, shape: AttentionShape) -> float:
    """Return the time of fused attention without the start of its kernels."""
    rate = model.attention_backward_flops if shape.backward else model.attention_flops
    half = HALF_LENGTH_CAUSAL if shape.causal else HALF_LENGTH
    nearest = min(HEAD_RATE, key=lambda size: abs(size - shape.head))
    length = min(shape.keys, shape.window or shape.keys)
    return shape.flops / (rate * HEAD_RATE[nearest] * length / (length + half))


SPLITS = (1, 2, 4, 8, 16)
# Smaller tiles load more operands per FLOP. Their rate relative to the largest tile: assumed, 2026-11.
SMALLER_TILES = ((1, 1, 1.0), (1, 2, 0.93), (2, 2, 0.82), (2, 4, 0.65))
# Filling the pipeline and writing the tile takes as long as this many elements of K.
START_K = 64


def gemm_seconds(model: GpuModel, gemm: MatrixProduct) -> float:
    """Return the time of the arithmetic of a gemm, without the start of its kernel and the transfer of its data."""
    return min(
        _tiled_seconds(model, gemm, (max(16, model.tile[0] // rows), max(16, model.tile[1] // columns)), share, split)
        for rows, columns, share in SMALLER_TILES
        for split in SPLITS
        if split == 1 or gemm.k // split >= 2 * START_K
    )


def rate(model: GpuModel, gemm: MatrixProduct) -> float:
    """Return the FLOP/s of a large gemm with operands of this type."""
    if gemm.eight_bits:
        return model.fp8_flops
    return model.gemm_flops if ITEM_BYTES[gemm.operand] <= 2 else model.fp32_flops


def _tiled_seconds(model: GpuModel, gemm: MatrixProduct, tile: tuple[int, int], share: float, split: int) -> float:
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
