"""Context parallelism: the mesh axis `context` splits each sequence, so that no device has all of its activations.

A sequence has 2C chunks of equal length on C devices. Device j has chunk j and chunk 2C - 1 - j: an early one, whose
queries see few keys, and a late one, whose queries see many. All devices then have the same causal work (zigzag). Keys
and values are gathered over the axis, and each device attends with its own queries.

Letters: B batch, S sequence, T positions on one device, H query heads, K kv heads, D head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from forerun.nn.attention import (
    RESIDUAL,
    Kernel,
    Scores,
    attend_in_blocks,
    block_length,
    splash_blocks,
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
        return split_splash(q_BTHD, k_BSKD, v_BSKD, segments_BT, segments_BS, scores=scores, kernel=kernel, split=split)
    B, T, H, D = q_BTHD.shape
    limit = min(block_length((B, k_BSKD.shape[1], H, D), kernel.block), T // 2)
    block = next(length for length in range(limit, 0, -1) if (T // 2) % length == 0)
    starts = partial(split.block_starts, T // 2, block)
    out = attend_in_blocks(q_BTHD, k_BSKD, v_BSKD, segments_BT, segments_BS, scores, block, starts)
    return checkpoint_name(out, RESIDUAL)


# ---- Splash attention of the queries on one device, with the masks of its two chunks ----
# JAX computes the mask of a splash kernel on the host, block by block. For a million positions this would take minutes,
# and the table would have all queries. Here the program computes the table of a device from its queries' positions.


# The fused backward kernel stores the gradient of the queries once for each block of keys. Above this limit, separate
# kernels for the gradients of queries and of keys need much less memory.
FUSED_BYTES = 1 << 30


@dataclass(frozen=True)
class VisibleKeys:
    """The mask inside the kernel. It has a value as its identity, so that a kernel is traced once per window."""

    window: int | None

    def __call__(self, q_ids: Any, kv_ids: Any) -> Any:
        seen = q_ids >= kv_ids
        return seen if self.window is None else seen & (q_ids - kv_ids < self.window)


def split_splash(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segments_BT: jax.Array,
    segments_BS: jax.Array,
    *,
    scores: Scores,
    kernel: Kernel,
    split: Any,
    interpret: bool = False,
) -> jax.Array:
    """Return the attention of the queries of a device to the keys of the complete sequence.

    Args:
        q_BTHD: Queries of an early and a late chunk. T / 2 is a multiple of 128.
        k_BSKD: Keys in the order of the text.
        v_BSKD: Values in the order of the text.
        segments_BT: The document of each query.
        segments_BS: The document of each key.
        scores: Scale, soft cap and window.
        kernel: The kernel's block length, and whether its backward pass should be fused.
        split: The `SequenceSplit`, which has the positions of the queries.
        interpret: Run the kernel in the interpreter of Pallas, on a CPU.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

    T, S = q_BTHD.shape[1], k_BSKD.shape[1]
    block = math.gcd(T // 2, kernel.block)
    is_short = (kernel.fused_length or S) >= S
    partial_bytes = S // block * q_BTHD.size * q_BTHD.dtype.itemsize
    fused = kernel.fused_backward and is_short and partial_bytes <= FUSED_BYTES
    starts = split.block_starts(T // 2, block)
    positions = (starts[:, None] + jnp.arange(block)).reshape(T)
    table = BlockTable(block, S // block, scores.window)

    def info(blocks: tuple[jax.Array, jax.Array]) -> Any:
        following, visible = blocks
        return mask_info.MaskInfo(following[None], None, visible[None], None, positions)

    by_row = info(table.of_queries(starts))
    attend: Any = splash.SplashAttentionKernel(
        by_row,
        None if fused else by_row,
        info(table.of_keys(starts, compact=not fused)),
        block_sizes=splash_blocks(block, fused),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=scores.softcap,
        residual_checkpoint_name=RESIDUAL,
        mask_function=VisibleKeys(scores.window),
        interpret=interpret,
    )
    B, _, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    q_BKGTD = (q_BTHD * scores.scale).reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4)
    k_BK1SD, v_BK1SD = (x.swapaxes(1, 2)[:, :, None] for x in (k_BSKD, v_BSKD))
    # Kv heads are a batch dimension. The two cores of a v4 or v5p share the batch of the backward kernels, and a long
    # sequence is often the only one.
    of_row = jax.vmap(attend, in_axes=(0, 0, 0, None))
    out_BKGTD: jax.Array = jax.vmap(of_row)(q_BKGTD, k_BK1SD, v_BK1SD, splash.SegmentIds(q=segments_BT, kv=segments_BS))
    return out_BKGTD.transpose(0, 3, 1, 2, 4).reshape(q_BTHD.shape)


@dataclass(frozen=True)
class BlockTable:
    """Which blocks of queries and keys a kernel visits.

    Each table has two arrays. The first has the number of the block that is fetched, the second is 1 if it has visible
    scores. A visit without visible scores fetches a block that is needed next, so that the kernel never waits for it.

    Attributes:
        block: The number of queries and of keys in a block.
        keys: The number of blocks of keys.
        window: The window of the attention, or None.
    """

    block: int
    keys: int
    window: int | None

    @property
    def width(self) -> int:
        """The largest number of blocks of keys that a block of queries sees."""
        first, last = self._seen(np.arange(self.keys) * self.block)
        return int(np.max(last - first)) + 1

    def height(self, queries: int) -> int:
        """Return the largest number of a device's blocks of queries, of `queries`, that see one block of keys."""
        if self.window is None:
            return queries
        of_chunk = (self.window + self.block - 2) // self.block + 1
        return 2 * min(of_chunk, queries // 2)

    def of_queries(self, starts_Q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the table for kernels that add up the keys of each block of queries, [Q, width]."""
        first_Q, last_Q = self._seen(starts_Q)
        blocks = first_Q[:, None] + jnp.arange(self.width)
        visible = blocks <= last_Q[:, None]
        return self._small(jnp.where(visible, blocks, jnp.roll(first_Q, -1)[:, None])), visible.astype(jnp.int8)

    def of_keys(self, starts_Q: jax.Array, *, compact: bool) -> tuple[jax.Array, jax.Array]:
        """Return the table for kernels that add up the queries of each block of keys, [height or Q, keys].

        With `compact`, visible blocks come first and most others are not visited. The fused kernel needs all of them.
        """
        first_Q, last_Q = self._seen(starts_Q)
        keys = jnp.arange(self.keys)
        visible = (first_Q[:, None] <= keys) & (keys <= last_Q[:, None])
        numbers = jnp.broadcast_to(jnp.arange(len(starts_Q))[:, None], visible.shape)
        if compact:
            order = jnp.argsort(~visible, axis=0, stable=True)[: self.height(len(starts_Q))]
            visible, numbers = (jnp.take_along_axis(x, order, axis=0) for x in (visible, numbers))
        # The last visible block stays in place during visits without work.
        newest = jax.lax.cummax(jnp.where(visible, jnp.arange(len(visible))[:, None], 0), axis=0)
        return self._small(jnp.take_along_axis(numbers, newest, axis=0)), visible.astype(jnp.int8)

    def _seen(self, starts: Any) -> tuple[Any, Any]:
        """Return the first and the last block of keys that each block of queries sees."""
        last = (starts + self.block - 1) // self.block
        if self.window is None:
            return starts * 0, last
        first = (starts - self.window + 1).clip(0) // self.block
        return first, last

    def _small(self, numbers: jax.Array) -> jax.Array:
        # The tables are in the scalar memory of a core, which has about a megabyte.
        return numbers.astype(jnp.int8 if self.keys <= 127 else jnp.int16)
