"""The rotation of RoPE by a product with a matrix of 0, 1 and -1.

B batch, S sequence, H heads, D head, C also D.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_vjp
def rotate_by_product(x_BSHD: jax.Array, cos_BS1D: jax.Array, sin_BS1D: jax.Array, other_DC: jax.Array) -> jax.Array:
    """Return `x cos + (x other) sin`, where `other` moves each dimension to its partner. The product is exact.

    On a TPU with a matrix unit of 256 x 256, the product takes less time than slices and a concatenation: halves of a
    head of 128 fill only half of the lanes, so their arrays take twice the memory traffic. Neighbours would need
    shifts by one lane. Weights keep the order of the checkpoint, so adapters and exports need no permutation.

    The gradient is the rotation by the opposite angles. JAX would derive a product of float32 values, and a sum of two
    gradients in the dtype of `x`. Angles have no gradient.
    """
    other_BSHC = jnp.einsum("BSHD,DC->BSHC", x_BSHD, other_DC, precision="highest", preferred_element_type=jnp.float32)
    return (x_BSHD.astype(jnp.float32) * cos_BS1D + other_BSHC * sin_BS1D).astype(x_BSHD.dtype)


def _forward(
    x_BSHD: jax.Array, cos_BS1D: jax.Array, sin_BS1D: jax.Array, other_DC: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return rotate_by_product(x_BSHD, cos_BS1D, sin_BS1D, other_DC), (cos_BS1D, sin_BS1D, other_DC)


def _backward(
    kept: tuple[jax.Array, jax.Array, jax.Array], gradient_BSHD: jax.Array
) -> tuple[jax.Array, None, None, None]:
    cos_BS1D, sin_BS1D, other_DC = kept
    return rotate_by_product(gradient_BSHD, cos_BS1D, -sin_BS1D, other_DC), None, None, None


rotate_by_product.defvjp(_forward, _backward)
