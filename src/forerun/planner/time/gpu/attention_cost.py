"""The time of cuDNN's fused attention.

The time is FLOPs divided by a rate that grows with the length of the sequence. A causal mask halves the FLOPs. With
packed rows, the lengths of the documents are unknown to the program, so each row counts as one document. The time is
then an upper bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.planner.hlo import Computation, Instruction
from forerun.planner.time.execution import target_of
from forerun.planner.time.gpu.gpu_model import GpuModel

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


def attention_shape(computation: Computation, x: Instruction) -> AttentionShape | None:
    """Return the dimensions of a call of cuDNN's fused attention, or None for other instructions.

    The operands are query, key and value as [batch, length, heads, head], or [batch, heads, length, head] where the
    configuration says so.
    """
    target = target_of(x) if x.op == "custom-call" else ""
    if not target.startswith(FUSED_ATTENTION):
        return None
    query, key = computation.operand(x, 0), computation.operand(x, 1)
    if query is None or key is None or len(query.shapes[0].dims) != 4 or len(key.shapes[0].dims) != 4:
        return None
    batch, queries, heads, head = query.shapes[0].dims
    keys = key.shapes[0].dims[1]
    if '"is_flash_attention_bnth":true' in x.attributes or _layout_is_bnth(x):
        heads, queries, keys = queries, heads, key.shapes[0].dims[2]
    mask = re.search(r'"mask_type":"(\w+)"', x.attributes)
    window = re.search(r'"sliding_window_length":"?(\d+)', x.attributes)
    return AttentionShape(
        batch,
        heads,
        queries,
        keys,
        head,
        causal="CAUSAL" in mask[1] if mask else "CAUSAL" in x.attributes,
        window=int(window[1]) if window else 0,
        backward="Backward" in target,
    )


def _layout_is_bnth(x: Instruction) -> bool:
    """Return whether heads come before positions: the configuration then contracts dimension 3 with batch 0 and 1."""
    found = re.search(r'"bmm1_dot_dimension_numbers":\{.*?"lhs_batch_dimensions":\[([^\]]*)\]', x.attributes)
    return bool(found) and re.findall(r"\d+", found[1]) == ["0", "1"]


def attention_seconds(model: GpuModel, shape: AttentionShape) -> float:
    """Return the time of fused attention without the start of its kernels."""
    rate = model.attention_backward_flops if shape.backward else model.attention_flops
    half = HALF_LENGTH_CAUSAL if shape.causal else HALF_LENGTH
    nearest = min(HEAD_RATE, key=lambda size: abs(size - shape.head))
    length = min(shape.keys, shape.window or shape.keys)
    return shape.flops / (rate * HEAD_RATE[nearest] * length / (length + half))
