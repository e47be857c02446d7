"""Causal attention behind one function, by the kernel that the device has.

Letters: B batch, S sequence, H query heads, K key/value heads, D head. Segments keep packed
documents apart: a position sees earlier positions of its own segment only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forerun.nn import sharding
from forerun.nn.cache import CachedLayer
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
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    old: CachedLayer,
    positions_BT: jax.Array,
    *,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attend to a cache and to the new tokens themselves, whose keys and values are not in the cache yet.

    Args:
      old: a key's place is its position. Seen are the places before a row's first query.
      positions_BT: of the queries. The new keys lie one after the other from a row's first position on; a query sees
        them up to its own position.
    """
    scores = Scores(q_BTHD.shape[-1] ** -0.5 if scale is None else scale, softcap, window)
    B, T, H, D = q_BTHD.shape
    K, S = old.values.shape[1:3]
    q_BKGTD = q_BTHD.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4) * jnp.asarray(scores.scale, q_BTHD.dtype)
    q_BKXD = q_BKGTD.reshape(B, K, -1, D)
    knew_BKTD, vnew_BKTD = (jnp.swapaxes(x, 1, 2) for x in (k_BTKD, v_BTKD))

    first_B11 = positions_BT[:, :1, None]
    places_S = jnp.arange(S)
    among = scores.seen(positions_BT[:, :, None] - (first_B11 + jnp.arange(T)))
    parts = [(CachedLayer(knew_BKTD, vnew_BKTD), among)]
    if S:  # else a prompt is read from its beginning
        before = scores.seen(positions_BT[:, :, None] - places_S) & (places_S < first_B11)
        parts.append((old, before))

    def products(part: CachedLayer, seen: jax.Array) -> jax.Array:
        found = soft_cap(_by_head(q_BKXD, part.keys, part.key_axes.index("D")), scores.softcap).reshape(
            B, K, H // K, T, -1
        )
        return jnp.where(seen[:, None, None], found, -jnp.inf)

    found = [products(part, seen) for part, seen in parts]
    highest = reduce(jnp.maximum, [jnp.max(x, axis=-1, keepdims=True) for x in found])
    found = [jnp.exp(x - highest) for x in found]
    total = reduce(jnp.add, [jnp.sum(x, axis=-1, keepdims=True) for x in found])
    shares = [(x / total).astype(v_BTKD.dtype).reshape(B, K, (H // K) * T, -1) for x in found]
    out_BKXD = reduce(
        jnp.add, [_by_head(share, part.values, 2) for share, (part, _) in zip(shares, parts, strict=True)]
    )
    out_BKGTD = out_BKXD.astype(q_BTHD.dtype).reshape(B, K, H // K, T, D)
    return out_BKGTD.transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)


def _by_head(x_BKXY: jax.Array, y_BKYZ: jax.Array, summed: int) -> jax.Array:
    """Multiply matrices of each row and head, in float32. Not by einsum, which swaps operands and then transposes."""
    return jax.lax.dot_general(
        x_BKXY, y_BKYZ, (((3,), (summed,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )


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
