"""Causal attention behind one function, by the kernel that the device has.

Letters: B batch, S sequence, H query heads, K key/value heads, D head. Segments keep packed
documents apart: a position sees earlier positions of its own segment only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forerun.nn import sharding
from forerun.nn.layers import soft_cap

RESIDUAL = "attention_out"


@dataclass(frozen=True)
class Kernel:
    """Which kernel, and for splash the block length (upper bound) and a fused backward pass."""

    name: Literal["splash", "cudnn", "xla"]
    block: int = 512
    fused_backward: bool = False


@jax.named_scope("attention")
def attention(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BS: jax.Array,
    *,
    window: int | None,
    kernel: Kernel,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Softmax attention, [B, S, H, D]. Scores are multiplied by `scale` (None: D ** -0.5), then soft-capped.

    What the backward pass needs of it bears the name `attention_out`, for remat to keep or offload:
    of splash, its output and the log-sum-exp of its scores, so that the kernel need not run again.
    """
    scores = Scores(q_BSHD.shape[-1] ** -0.5 if scale is None else scale, softcap, window)
    if kernel.name == "splash":
        return _splash(q_BSHD, k_BSKD, v_BSKD, segments_BS, scores, kernel)
    if kernel.name == "cudnn":
        return checkpoint_name(_cudnn(q_BSHD, k_BSKD, v_BSKD, segments_BS, scores), RESIDUAL)
    return checkpoint_name(_blockwise(q_BSHD, k_BSKD, v_BSKD, segments_BS, scores, kernel.block), RESIDUAL)


@jax.named_scope("attention")
def cached_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    positions_BT: jax.Array,
    *,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """A few queries against a cache in which a key's place is its position: later places are not seen yet."""
    scores = Scores(q_BTHD.shape[-1] ** -0.5 if scale is None else scale, softcap, window)
    behind_BTS = positions_BT[:, :, None] - jnp.arange(k_BSKD.shape[1])
    return _softmax_attention(q_BTHD, k_BSKD, v_BSKD, scores.seen(behind_BTS), scores)


@dataclass(frozen=True)
class Scores:
    """What becomes of a query times a key."""

    scale: float
    softcap: float | None
    window: int | None

    def seen(self, behind: jax.Array) -> jax.Array:
        """By how far a key lies behind its query."""
        return (behind >= 0) if self.window is None else (behind >= 0) & (behind < self.window)


def _cudnn(
    q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array, scores: Scores
) -> jax.Array:
    """Causality and the window are the kernel's own; only the segments are a mask."""
    return jax.nn.dot_product_attention(
        q_BSHD,
        k_BSKD,
        v_BSKD,
        mask=segments_BS[:, None, :, None] == segments_BS[:, None, None, :],
        is_causal=True,
        scale=scores.scale,
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation="cudnn",
    )


def _blockwise(
    q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array, scores: Scores, block: int
) -> jax.Array:
    """Plain XLA. Long sequences take their queries block by block, so that S x S scores never exist."""
    B, S, H, D = q_BSHD.shape

    def some(queries: jax.Array, segments_BT: jax.Array, start: jax.Array | int) -> jax.Array:
        behind_TS = start + jnp.arange(queries.shape[1])[:, None] - jnp.arange(S)[None, :]
        seen = scores.seen(behind_TS) & (segments_BT[:, :, None] == segments_BS[:, None, :])
        return _softmax_attention(queries, k_BSKD, v_BSKD, seen, scores)

    if 2 * block >= S or S % block:
        return some(q_BSHD, segments_BS, 0)

    def one(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return some(*piece)

    blocks = S // block
    queries = jnp.moveaxis(q_BSHD.reshape(B, blocks, block, H, D), 1, 0)
    segments = jnp.moveaxis(segments_BS.reshape(B, blocks, block), 1, 0)
    out = jax.lax.map(jax.checkpoint(one), (queries, segments, jnp.arange(blocks) * block))
    return jnp.moveaxis(out, 0, 1).reshape(q_BSHD.shape)


def _softmax_attention(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, seen_BTS: jax.Array, scores: Scores
) -> jax.Array:
    """Queries against all keys, scores in float32."""
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D) * jnp.asarray(scores.scale, q_BTHD.dtype)
    products = jnp.einsum("BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=jnp.float32)
    products = soft_cap(products, scores.softcap)
    shares = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], products, -jnp.inf), axis=-1)
    out = jnp.einsum("BKGTS,BSKD->BTKGD", shares.astype(v_BSKD.dtype), v_BSKD)
    return out.reshape(B, T, H, D)


def _splash(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BS: jax.Array,
    scores: Scores,
    kernel: Kernel,
) -> jax.Array:
    """Each device runs the kernel on its own examples and heads."""
    sizes = sharding.ambient_sizes()
    if k_BSKD.shape[2] % sizes.get("tp", 1):  # fewer kv heads than tp: each device needs its own copy
        groups = q_BSHD.shape[2] // k_BSKD.shape[2]
        k_BSKD, v_BSKD = (jnp.repeat(x, groups, axis=2) for x in (k_BSKD, v_BSKD))
    run = partial(_splash_local, scores=scores, kernel=kernel)
    if math.prod(sizes.values()) == 1:
        return run(q_BSHD, k_BSKD, v_BSKD, segments_BS)
    heads = PartitionSpec(sharding.BATCH_AXES, None, "tp", None)
    rows = PartitionSpec(sharding.BATCH_AXES, None)
    return jax.shard_map(run, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)(
        q_BSHD, k_BSKD, v_BSKD, segments_BS
    )


def _splash_local(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BS: jax.Array,
    *,
    scores: Scores,
    kernel: Kernel,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q_BSHD.shape[1:3]
    padded = -(-length // 128) * 128
    q, k, v = (_padded(x, padded).swapaxes(1, 2) for x in (q_BSHD * scores.scale, k_BSKD, v_BSKD))  # [B, H, S, D]
    segments = jnp.pad(segments_BS, ((0, 0), (0, padded - length)), constant_values=-1)

    block = math.gcd(padded, kernel.block)
    shape = (padded, padded)
    window = scores.window
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    blocks = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if kernel.fused_backward else block,
        block_kv_dq=None if kernel.fused_backward else block,
        use_fused_bwd_kernel=kernel.fused_backward,
    )
    attend = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        residual_checkpoint_name=RESIDUAL,
        attn_logits_soft_cap=scores.softcap,
    )
    ids = splash.SegmentIds(q=segments, kv=segments)
    out = jax.vmap(attend)(q, k, v, ids)
    return out.swapaxes(1, 2)[:, :length]


def _padded(x_BSHD: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x_BSHD, ((0, 0), (0, length - x_BSHD.shape[1]), (0, 0), (0, 0)))
