"""The small layers every decoder shares. Letters: B batch, S sequence, E embed, H heads, D head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from forerun.nn import sharding


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, *, around_one: bool = False) -> jax.Array:
    """Over the dimensions of the scale, in float32, back in x's dtype. `around_one`: Gemma stores scale - 1."""
    dims = tuple(range(-scale.ndim, 0))
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=dims, keepdims=True) + epsilon)
    if around_one:
        return (wide * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """Over the last dimension, in float32, back in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Squeezed smoothly into (-cap, cap)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def embed(table_VE: jax.Array, tokens_BS: jax.Array, dtype: Any) -> jax.Array:
    """Look tokens up where the table lies: every device reads its own slice of the embedding for all
    tokens of its fsdp group, and the slices change places. The table itself never travels."""
    slices = sharding.lookup(table_VE, tokens_BS)
    return sharding.constrain(slices.astype(dtype), "BSE")
