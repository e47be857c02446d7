"""The small layers every decoder shares. Letters: B batch, S sequence, E embed, H heads, D head."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from forerun.config.schema import RopeScaling
from forerun.nn import sharding


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Over the last dimension, in float32, back in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Radians per position for each pair of dimensions, with Llama-3 scaling if there is any."""
    frequencies = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    # 1 for wavelengths well inside the original context, 0 well beyond it, straight in between.
    inside = (scaling.original / wavelengths - scaling.low) / (scaling.high - scaling.low)
    inside = jnp.clip(inside, 0.0, 1.0)
    return frequencies * (inside + (1 - inside) / scaling.factor)


def rope_angles(positions: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, [B, S, 1, D/2], in float32: positions beyond 256 are not exact in bfloat16."""
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rope(x_BSHD: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first half of each head against the second (the Hugging Face layout)."""
    cos, sin = angles
    first, second = jnp.split(x_BSHD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x_BSHD.dtype)


def embed(table_VE: jax.Array, tokens_BS: jax.Array, dtype: Any) -> jax.Array:
    """Look tokens up where the table lies: every device reads its own slice of the embedding for all
    tokens of its fsdp group, and the slices change places. The table itself never travels."""
    slices = sharding.lookup(table_VE, tokens_BS)
    return sharding.constrain(slices.astype(dtype), "BSE")
