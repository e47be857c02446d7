"""Causal attention: one function for training, with a choice of kernels, and one for decoding with a cache.

Letters: B batch, S sequence, T new tokens or a block of queries, H query heads, K key/value heads, G query heads per
key/value head, D head. Segments separate packed documents: a position attends only to itself and to earlier positions
of the same segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forerun.nn import sharding
from forerun.nn.gpu_attention import FlashSettings, cudnn_attention, cudnn_supports
from forerun.nn.kv_cache import CachedLayer
from forerun.nn.layers import soft_cap

RESIDUAL = "attention_out"
# Limits of plain XLA attention: the float32 scores of one block of queries on a device, and queries per block. A block
# of 512 queries would have 4 GiB of scores for 2 rows of 32,768 positions and 32 heads.
SCORES_BYTES, SMALLEST_BLOCK = 1 << 30, 64


@dataclass(frozen=True)
class Kernel:
    """The attention kernel and its settings."""

    name: Literal["splash", "cudnn", "xla"]
    block: int = 512  # largest block length of splash, and queries per block of xla; cudnn ignores it
    fused_backward: bool = False  # splash only: compute all gradients in one kernel
    fused_length: int | None = None  # the longest sequence for which that is done; None: any
    largest_head: int = 128  # cudnn only: layers with larger heads use xla


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
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return causal softmax attention within each segment, [B, S, H, D].

    The residuals of the backward pass are named `attention_out`, so that a remat policy can keep or offload them. For
    splash and cudnn these are the output and the log-sum-exp of the scores. If they are kept, the backward pass does
    not run the forward kernel again.

    Args:
        q_BSHD: Queries. H is a multiple of K.
        k_BSKD: Keys.
        v_BSKD: Values.
        segments_BS: The document of each position.
        window: The number of positions that a query sees, including its own, or None for all.
        kernel: The kernel that computes the attention.
        scale: The factor for the scores, or None for D ** -0.5.
        softcap: The soft cap, which is applied to the scaled scores, or None.
        sinks_H: A learned score of each head in the denominator of the softmax, without a value, or None (gpt-oss).
    """
    scores = Scores(q_BSHD.shape[-1] ** -0.5 if scale is None else scale, softcap, window)
    if kernel.name == "splash":
        local = partial(_splash_local, scores=scores, kernel=kernel)
        return split_over_devices(local, q_BSHD, k_BSKD, v_BSKD, segments_BS, sinks_H=sinks_H)
    if kernel.name == "cudnn" and sinks_H is None and cudnn_supports(q_BSHD, softcap, kernel.largest_head):
        settings = FlashSettings(scores.scale, window, RESIDUAL)
        return split_over_devices(partial(cudnn_attention, settings=settings), q_BSHD, k_BSKD, v_BSKD, segments_BS)
    return checkpoint_name(_blockwise(q_BSHD, k_BSKD, v_BSKD, segments_BS, scores, kernel.block, sinks_H), RESIDUAL)


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
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention of new tokens to a cache and to each other, [B, T, H, D].

    The keys and values of the new tokens are not in the cache yet.

    Args:
        q_BTHD: Queries of the new tokens.
        k_BTKD: Keys of the new tokens. They have consecutive positions from a row's first position.
        v_BTKD: Values of the new tokens.
        old: The cache of this layer, in which a key's index is its position. A row attends to all indices before its
            first query; later ones may be stale.
        positions_BT: Positions of the queries. A query sees new keys up to its own position.
        window: The number of positions that a query sees, including its own, or None for all.
        scale: The factor for the scores, or None for D ** -0.5.
        softcap: The soft cap, which is applied to the scaled scores, or None.
        sinks_H: A learned score of each head in the denominator of the softmax, or None.
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
    if S:  # an empty cache means that the new tokens are the start of a prompt
        before = scores.seen(positions_BT[:, :, None] - places_S) & (places_S < first_B11)
        parts.append((old, before))

    def products(part: CachedLayer, seen: jax.Array) -> jax.Array:
        found = soft_cap(_by_head(q_BKXD, part.keys, part.key_axes.index("D")), scores.softcap).reshape(
            B, K, H // K, T, -1
        )
        return jnp.where(seen[:, None, None], found, -jnp.inf)

    # One softmax over both parts, without concatenating them: that would copy the cache for every token.
    found = [products(part, seen) for part, seen in parts]
    highest = reduce(jnp.maximum, [jnp.max(x, axis=-1, keepdims=True) for x in found])
    sinks_KG11 = None if sinks_H is None else by_group(sinks_H, K)
    if sinks_KG11 is not None:
        highest = jnp.maximum(highest, sinks_KG11)
    found = [jnp.exp(x - highest) for x in found]
    total = reduce(jnp.add, [jnp.sum(x, axis=-1, keepdims=True) for x in found])
    if sinks_KG11 is not None:
        total = total + jnp.exp(sinks_KG11 - highest)
    shares = [(x / total).astype(v_BTKD.dtype).reshape(B, K, (H // K) * T, -1) for x in found]
    out_BKXD = reduce(
        jnp.add, [_by_head(share, part.values, 2) for share, (part, _) in zip(shares, parts, strict=True)]
    )
    out_BKGTD = out_BKXD.astype(q_BTHD.dtype).reshape(B, K, H // K, T, D)
    return out_BKGTD.transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)


def _by_head(x_BKXY: jax.Array, y_BKYZ: jax.Array, summed: int) -> jax.Array:
    """Return the matrix products of each row and head, accumulated in float32.

    `jnp.einsum` would swap the operands and then transpose the result.
    """
    return jax.lax.dot_general(
        x_BKXY, y_BKYZ, (((3,), (summed,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )


@dataclass(frozen=True)
class Scores:
    """How attention scores are scaled, capped and masked by distance."""

    scale: float
    softcap: float | None
    window: int | None

    def seen(self, behind: jax.Array) -> jax.Array:
        """Return the mask of visible keys, given the distance from each key to its query (0: the same position)."""
        return (behind >= 0) if self.window is None else (behind >= 0) & (behind < self.window)


def _blockwise(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BS: jax.Array,
    scores: Scores,
    block: int,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention by plain XLA operations.

    Long sequences process their queries in blocks, so that the S x S scores are never in memory together.
    """
    S = q_BSHD.shape[1]
    block = block_length(q_BSHD.shape, block)
    if 2 * block >= S or S % block:
        seen = scores.seen(jnp.arange(S)[:, None] - jnp.arange(S)) & (
            segments_BS[:, :, None] == segments_BS[:, None, :]
        )
        return softmax_attention(q_BSHD, k_BSKD, v_BSKD, seen, scores, sinks_H)

    def starts() -> jax.Array:
        return jnp.arange(S // block) * block

    return attend_in_blocks(q_BSHD, k_BSKD, v_BSKD, segments_BS, segments_BS, scores, block, starts, sinks_H)


def attend_in_blocks(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BT: jax.Array,
    segments_BS: jax.Array,
    scores: Scores,
    block: int,
    starts: Callable[[], jax.Array],
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention by plain XLA operations, one block of queries after the other.

    `starts` returns the index in the text of the first query of each block. T may be a part of the S positions.
    """
    B, T, H, D = q_BTHD.shape
    S = k_BSKD.shape[1]
    # A block of queries sees only the keys of its window, up to the last query. Without a window, these are all keys.
    length = S if scores.window is None else min(S, block + scores.window - 1)

    def one(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, segments_BX, start = piece
        first = 0 if length == S else jnp.maximum(0, start + block - length)
        k, v, segments_BL = (_keys_from(x, first, length) for x in (k_BSKD, v_BSKD, segments_BS))
        behind_XL = start + jnp.arange(block)[:, None] - (first + jnp.arange(length))
        seen = scores.seen(behind_XL) & (segments_BX[:, :, None] == segments_BL[:, None, :])
        return softmax_attention(queries, k, v, seen, scores, sinks_H)

    # `lax.map` runs one block after the other. `jax.checkpoint` makes the backward pass recompute the scores of a
    # block; otherwise it would keep the scores of all blocks, which is the S x S memory again.
    blocks = T // block
    queries = jnp.moveaxis(q_BTHD.reshape(B, blocks, block, H, D), 1, 0)
    segments = jnp.moveaxis(segments_BT.reshape(B, blocks, block), 1, 0)
    out = jax.lax.map(jax.checkpoint(one), (queries, segments, starts()))
    return jnp.moveaxis(out, 0, 1).reshape(q_BTHD.shape)


def _keys_from(x_BS: jax.Array, first: jax.Array | int, length: int) -> jax.Array:
    """Return `length` positions of an array [B, S, ...], or the array itself if these are all."""
    return x_BS if length == x_BS.shape[1] else jax.lax.dynamic_slice_in_dim(x_BS, first, length, axis=1)


def block_length(shape_BSHD: tuple[int, ...], block: int) -> int:
    """Return the number of queries in a block: at most `block`, and less if the scores would exceed their limit."""
    B, S, H, _ = shape_BSHD
    sizes = sharding.ambient_sizes()
    rows = max(1, B // math.prod(sizes.get(axis, 1) for axis in sharding.BATCH_AXES))
    heads = max(1, H // sizes.get("tp", 1))
    while block > SMALLEST_BLOCK and block % 2 == 0 and 4 * rows * heads * block * S > SCORES_BYTES:
        block //= 2
    return block


def softmax_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    seen_BTS: jax.Array,
    scores: Scores,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention of the queries to all keys that `seen_BTS` allows, with scores in float32."""
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D) * jnp.asarray(scores.scale, q_BTHD.dtype)
    products = jnp.einsum("BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=jnp.float32)
    products = soft_cap(products, scores.softcap)
    products = jnp.where(seen_BTS[:, None, None], products, -jnp.inf)
    shares = jax.nn.softmax(products, axis=-1) if sinks_H is None else _softmax_with_sinks(products, sinks_H)
    out = jnp.einsum("BKGTS,BSKD->BTKGD", shares.astype(v_BSKD.dtype), v_BSKD)
    return out.reshape(B, T, H, D)


def _softmax_with_sinks(products_BKGTS: jax.Array, sinks_H: jax.Array) -> jax.Array:
    """Return the softmax over the scores of keys and the sink of the head, without the share of the sink."""
    sinks_KG11 = by_group(sinks_H, products_BKGTS.shape[1])
    highest = jnp.maximum(jnp.max(products_BKGTS, axis=-1, keepdims=True), sinks_KG11)
    highest = jax.lax.stop_gradient(highest)  # it cancels
    powers = jnp.exp(products_BKGTS - highest)
    return powers / (jnp.sum(powers, axis=-1, keepdims=True) + jnp.exp(sinks_KG11 - highest))


def by_group(sinks_H: jax.Array, kv_heads: int) -> jax.Array:
    """Return the sinks in float32, [K, G, 1, 1], as scores [B, K, G, T, S] need them."""
    return sinks_H.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)


def split_over_devices(
    run: Callable[..., jax.Array],
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BS: jax.Array,
    sequence: str | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Return attention by a function that each device runs on its own rows and heads.

    `sequence` is the mesh axis that splits S, or None. With sinks, the function gets those of its heads last.
    """
    sizes = sharding.ambient_sizes()
    # The partitioner cannot split a kernel, so `shard_map` splits rows and heads explicitly. If tp does not divide the
    # kv heads, repeat them: every device then has the kv heads of its query heads.
    if k_BSKD.shape[2] % sizes.get("tp", 1):
        groups = q_BSHD.shape[2] // k_BSKD.shape[2]
        k_BSKD, v_BSKD = (jnp.repeat(x, groups, axis=2) for x in (k_BSKD, v_BSKD))
    sinks = () if sinks_H is None else (sinks_H,)
    if math.prod(sizes.values()) == 1:
        return run(q_BSHD, k_BSKD, v_BSKD, segments_BS, *sinks)
    heads = PartitionSpec(sharding.batch_axes(), sequence, "tp", None)
    rows = PartitionSpec(sharding.batch_axes(), sequence)
    specs = (heads, heads, heads, rows, *(PartitionSpec("tp") for _ in sinks))
    return jax.shard_map(run, in_specs=specs, out_specs=heads, check_vma=False)(
        q_BSHD, k_BSKD, v_BSKD, segments_BS, *sinks
    )


def _splash_local(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BS: jax.Array,
    sinks_H: jax.Array | None = None,
    *,
    scores: Scores,
    kernel: Kernel,
    interpret: bool = False,
) -> jax.Array:
    """Return attention of the rows and heads on one device. `interpret` runs the kernel on a CPU."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    # Splash needs block lengths that are multiples of 128, the lanes of a TPU register. Padding is a segment of its
    # own (-1), which real positions never see. The kernel does not scale scores, so the queries are scaled here.
    length, heads = q_BSHD.shape[1:3]
    padded = -(-length // 128) * 128
    q, k, v = (_padded(x, padded).swapaxes(1, 2) for x in (q_BSHD * scores.scale, k_BSKD, v_BSKD))  # [B, H, S, D]
    segments = jnp.pad(segments_BS, ((0, 0), (0, padded - length)), constant_values=-1)

    block = math.gcd(padded, kernel.block)  # blocks must divide the padded length
    fused = kernel.fused_backward and padded <= (kernel.fused_length or padded)
    shape = (padded, padded)
    window = scores.window
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    attend = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash_blocks(block, fused),
        residual_checkpoint_name=RESIDUAL,
        attn_logits_soft_cap=scores.softcap,
        interpret=interpret,
    )
    ids = splash.SegmentIds(q=segments, kv=segments)
    if sinks_H is None:
        out = jax.vmap(attend)(q, k, v, ids)
    else:  # the kernel returns the gradient of the sinks in the dtype of its output
        out = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks_H.astype(q.dtype))
    return out.swapaxes(1, 2)[:, :length]


def splash_blocks(block: int, fused: bool) -> Any:
    """Return the block sizes of splash for one block length, with or without a fused backward kernel."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )


def _padded(x_BSHD: jax.Array, length: int) -> jax.Array:
    return jnp.pad(x_BSHD, ((0, 0), (0, length - x_BSHD.shape[1]), (0, 0), (0, 0)))
