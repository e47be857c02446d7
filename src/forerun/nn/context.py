"""Context parallelism: the mesh axis `context` splits each sequence, so that no device has all of its activations.

A sequence has 2C chunks of equal length on C devices. Device j has chunk j and chunk 2C - 1 - j: an early one, whose
queries see few keys, and a late one, whose queries see many. All devices then have the same causal work (zigzag). Keys
and values are gathered over the axis, and each device attends with its own queries.

Letters: B batch, S sequence, T positions on one device, H query heads, K kv heads, D head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forerun.nn.attention import (
    RESIDUAL,
    Kernel,
    Scores,
    block_length,
    keys_from,
    softmax_attention,
    split_over_devices,
)
from forerun.nn.sharding import CONTEXT, ambient_sizes, batch_axes, context_axis


@dataclass(frozen=True)
class SequenceSplit:
    """How sequences are split over the context axis of the ambient mesh."""

    devices: int

    def spread(self, x_BS: jax.Array) -> jax.Array:
        """Return an array [B, S, ...] in the order of the text with its chunks on the devices that compute them."""
        return self._exchanged(x_BS, self._to_devices)

    def in_text_order(self, x_BS: jax.Array) -> jax.Array:
        """Return an array [B, S, ...] in the order of the text, after `spread`."""
        return self._exchanged(x_BS, self._to_text)

    def gathered(self, x_BT: jax.Array) -> jax.Array:
        """Return the complete array [B, S, ...] in the order of the text, from the part of a device in `shard_map`."""
        parts = jax.lax.all_gather(x_BT, CONTEXT)  # [C, B, T, ...]
        early, late = jnp.split(parts, 2, axis=2)
        chunks = jnp.concatenate((early, late[::-1]), axis=0)  # [2C, B, T / 2, ...]
        return jnp.moveaxis(chunks, 0, 1).reshape(x_BT.shape[0], -1, *x_BT.shape[2:])

    def starts(self, length: int) -> tuple[jax.Array, jax.Array]:
        """Return the index in the text of the first position of both chunks, on a device in `shard_map`.

        Args:
            length: The number of positions of a chunk.
        """
        device = jax.lax.axis_index(CONTEXT)
        return device * length, (2 * self.devices - 1 - device) * length

    def block_starts(self, length: int, block: int) -> jax.Array:
        """Return the index in the text of the first position of each block of a device. `block` divides `length`."""
        offsets = jnp.arange(0, length, block)
        return jnp.concatenate([start + offsets for start in self.starts(length)])

    def _exchanged(self, x_BS: jax.Array, exchange: Any) -> jax.Array:
        spec = PartitionSpec(batch_axes(), CONTEXT, *(None,) * (x_BS.ndim - 2))
        moved: jax.Array = jax.shard_map(exchange, in_specs=spec, out_specs=spec, check_vma=False)(x_BS)
        return moved

    def _owners(self, chunks: range) -> list[int]:
        """Return the device of each chunk."""
        return [min(chunk, 2 * self.devices - 1 - chunk) for chunk in chunks]

    def _routes(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (device in the order of the text, device that computes) for the even and for the odd chunks."""
        even, odd = range(0, 2 * self.devices, 2), range(1, 2 * self.devices, 2)
        return list(enumerate(self._owners(even))), list(enumerate(self._owners(odd)))

    def _to_devices(self, x_BT: jax.Array) -> jax.Array:
        even, odd = (
            jax.lax.ppermute(half, CONTEXT, route)
            for half, route in zip(jnp.split(x_BT, 2, axis=1), self._routes(), strict=True)
        )
        return self._ordered(even, odd)

    def _to_text(self, x_BT: jax.Array) -> jax.Array:
        # An even device has an even chunk first, an odd device an odd one. So the same exchange sorts by parity.
        even, odd = jnp.split(self._ordered(*jnp.split(x_BT, 2, axis=1)), 2, axis=1)
        halves = [
            jax.lax.ppermute(half, CONTEXT, [(target, source) for source, target in route])
            for half, route in zip((even, odd), self._routes(), strict=True)
        ]
        return jnp.concatenate(halves, axis=1)

    def _ordered(self, first: jax.Array, second: jax.Array) -> jax.Array:
        """Return both chunks, exchanged on devices with an odd number."""
        swapped = jax.lax.axis_index(CONTEXT) % 2 == 1
        return jnp.concatenate((jnp.where(swapped, second, first), jnp.where(swapped, first, second)), axis=1)


def sequence_split(length: int) -> SequenceSplit | None:
    """Return how sequences of this length are split on the ambient mesh, or None if they are not."""
    return None if context_axis(length) is None else SequenceSplit(ambient_sizes()[CONTEXT])


@jax.named_scope("attention")
def split_attention(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BS: jax.Array,
    *,
    window: int | None,
    kernel: Kernel,
    split: SequenceSplit,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Return the same as `attention`, for arrays in the order of `split`."""
    scores = Scores(q_BSHD.shape[-1] ** -0.5 if scale is None else scale, softcap, window)
    local = partial(_local, scores=scores, kernel=kernel, split=split)
    return split_over_devices(local, q_BSHD, k_BSKD, v_BSKD, segments_BS, CONTEXT)


def _local(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segments_BT: jax.Array,
    *,
    scores: Scores,
    kernel: Kernel,
    split: SequenceSplit,
) -> jax.Array:
    """Return the attention of the queries on one device."""
    # The gradient of the gather is a reduce-scatter, so no device keeps gradients of all keys.
    k_BSKD, v_BSKD, segments_BS = (split.gathered(x) for x in (k_BTKD, v_BTKD, segments_BT))
    if kernel.name == "splash":
        from forerun.nn.split_splash import split_splash

        return split_splash(q_BTHD, k_BSKD, v_BSKD, segments_BT, segments_BS, scores=scores, kernel=kernel, split=split)
    out = _blockwise(q_BTHD, k_BSKD, v_BSKD, segments_BT, segments_BS, scores, kernel.block, split)
    return checkpoint_name(out, RESIDUAL)


def _blockwise(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BT: jax.Array,
    segments_BS: jax.Array,
    scores: Scores,
    block: int,
    split: SequenceSplit,
) -> jax.Array:
    """Return attention by plain XLA operations, one block of queries after the other."""
    B, T, H, D = q_BTHD.shape
    S = k_BSKD.shape[1]
    limit = min(block_length((B, S, H, D), block), T // 2)
    block = next(length for length in range(limit, 0, -1) if (T // 2) % length == 0)
    # A block of queries sees only the keys of its window, up to the last query. Without a window, these are all keys.
    length = S if scores.window is None else min(S, block + scores.window - 1)

    def one(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, segments_BX, start = piece
        first = 0 if length == S else jnp.maximum(0, start + block - length)
        k, v, segments_BL = (keys_from(x, first, length) for x in (k_BSKD, v_BSKD, segments_BS))
        behind_XL = start + jnp.arange(block)[:, None] - (first + jnp.arange(length))
        seen = scores.seen(behind_XL) & (segments_BX[:, :, None] == segments_BL[:, None, :])
        return softmax_attention(queries, k, v, seen, scores)

    # As in `attention`: the backward pass recomputes the scores of a block, so they are never in memory together.
    blocks = T // block
    queries = jnp.moveaxis(q_BTHD.reshape(B, blocks, block, H, D), 1, 0)
    segments = jnp.moveaxis(segments_BT.reshape(B, blocks, block), 1, 0)
    out = jax.lax.map(jax.checkpoint(one), (queries, segments, split.block_starts(T // 2, block)))
    return jnp.moveaxis(out, 0, 1).reshape(q_BTHD.shape)
