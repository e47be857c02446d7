"""A short causal convolution over time that treats each channel separately, for training and for generation.

Letters: B batch, S sequence, T new tokens, I inputs of a convolution (its width). `X` stands for one or more dimensions
of channels, such as the heads and the dimensions of a head. Weights are [X, I], and the last one belongs to the
current token. The sum is float32, and the result has the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


@jax.named_scope("short_convolution")
def short_convolution(
    x_BSX: jax.Array,
    weight_XI: jax.Array,
    segments_BS: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Return the convolution of each channel, [B, S, X]. Inputs of other documents count as zero.

    Args:
        x_BSX: The inputs.
        weight_XI: The weights of each channel, from the earliest input to the current one.
        segments_BS: The document of each position. The tokens of a document are adjacent.
        activation: A function of the sum in float32, or None.
    """
    total = jnp.zeros(x_BSX.shape, jnp.float32)
    # One shifted product for each input: XLA fuses them into one pass over the array. A convolution of XLA would need
    # another program for the borders of documents.
    for back in range(weight_XI.shape[-1]):
        same_BS = segments_BS == _later(segments_BS, back, outside=-1)
        shifted = jnp.where(_like(same_BS, x_BSX), _later(x_BSX, back), jnp.zeros((), x_BSX.dtype))
        total = total + shifted.astype(jnp.float32) * weight_XI[..., -1 - back].astype(jnp.float32)
    return (total if activation is None else activation(total)).astype(x_BSX.dtype)


@jax.named_scope("short_convolution")
def extended_convolution(
    x_BTX: jax.Array,
    weight_XI: jax.Array,
    old_BIX: jax.Array,
    real_BT: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the convolution for new tokens of each row, [B, T, X], and the inputs that later tokens need.

    Args:
        x_BTX: The inputs of the new tokens.
        weight_XI: The weights of each channel, from the earliest input to the current one.
        old_BIX: The last width - 1 inputs before the new tokens, zero before the start of a text.
        real_BT: Whether a token is real. Padding is at the end of a row, and does not become an old input.
        activation: A function of the sum in float32, or None.
    """
    T, width = x_BTX.shape[1], weight_XI.shape[-1]
    known = jnp.concatenate([old_BIX.astype(x_BTX.dtype), x_BTX], axis=1)
    total = jnp.zeros(x_BTX.shape, jnp.float32)
    for place in range(width):
        total = total + known[:, place : place + T].astype(jnp.float32) * weight_XI[..., place].astype(jnp.float32)

    # The new old inputs end with the last real token of the row.
    count_B = jnp.sum(real_BT, axis=1, dtype=jnp.int32)
    new = jax.vmap(lambda row, count: jax.lax.dynamic_slice_in_dim(row, count, width - 1))(known, count_B)
    return (total if activation is None else activation(total)).astype(x_BTX.dtype), new.astype(old_BIX.dtype)


def real_tokens(positions_BT: jax.Array) -> jax.Array:
    """Return which new tokens are real. Padding at the end of a row repeats the last position of the row."""
    changed = positions_BT[:, 1:] != positions_BT[:, :-1]
    return jnp.concatenate([jnp.ones_like(changed[:, :1], shape=(positions_BT.shape[0], 1)), changed], axis=1)


def _later(x: jax.Array, steps: int, outside: int = 0) -> jax.Array:
    """Return `x` moved by `steps` positions along the sequence."""
    padding = [(0, 0), (steps, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding, constant_values=outside)[:, : x.shape[1]]


def _like(mask_BS: jax.Array, x: jax.Array) -> jax.Array:
    return mask_BS.reshape(*mask_BS.shape, *[1] * (x.ndim - 2))
