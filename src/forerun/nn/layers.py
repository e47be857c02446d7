"""Small layers that all decoders share. Letters: B batch, S sequence, V vocab, E embed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from forerun.nn import sharding
from forerun.nn.weights.dense import Extended


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, *, around_one: bool = False) -> jax.Array:
    """Return the RMS norm of `x` over the dimensions of `scale`, computed in float32, in the dtype of `x`.

    With `around_one`, the scale is stored as its difference from 1, as in Gemma.
    """
    dims = tuple(range(-scale.ndim, 0))
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=dims, keepdims=True) + epsilon)
    if around_one:
        return (wide * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def unscaled_rms_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """Return the RMS norm of `x` over its last dimension without a scale, computed in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """Return the layer norm of `x` over its last dimension, computed in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return `cap * tanh(x / cap)`, which is between -cap and cap, or `x` if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def embed(table_VE: jax.Array | Extended[jax.Array], tokens_BS: jax.Array, dtype: Any) -> jax.Array:
    """Return the embeddings of the tokens, [B, S, E], without gathering the table over fsdp.

    Each device looks up all tokens of its fsdp group in its own slice of the table. Then the devices exchange the
    results, which are smaller than the table.
    """
    if isinstance(table_VE, Extended):
        return sharding.constrain(table_VE.lookup(tokens_BS, dtype), "BSE")
    slices = sharding.lookup(table_VE, tokens_BS)
    return sharding.constrain(slices.astype(dtype), "BSE")
