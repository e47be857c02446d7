"""Products of groups of rows with one matrix each, for experts. No row is dropped or padded.

X groups, I input dimension, O output dimension, N rows. The first `sizes_X[0]` rows belong to group 0, and so on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Tiles of rows, inputs and outputs in the kernel for the weights' gradient. They need 8 MiB of on-chip memory.
ROWS, INPUTS, OUTPUTS = 512, 512, 1024


@jax.custom_vjp
def grouped_matmul(x_NI: jax.Array, weight_XIO: jax.Array, sizes_X: jax.Array) -> jax.Array:
    """Return each row multiplied by the matrix of its group, [N, O].

    The TPU compiler has a kernel for `ragged_dot`, but it computes the gradient of the weights that JAX derives with
    all rows for every group: X times too many FLOPs. So this gradient has a Pallas kernel on TPUs.
    """
    return jax.lax.ragged_dot(x_NI, weight_XIO, sizes_X)


def _forward(x_NI: jax.Array, weight_XIO: jax.Array, sizes_X: jax.Array) -> tuple[jax.Array, Any]:
    return grouped_matmul(x_NI, weight_XIO, sizes_X), (x_NI, weight_XIO, sizes_X)


def _backward(kept: Any, gradient_NO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_NI, weight_XIO, sizes_X = kept
    x_gradient = jax.lax.ragged_dot(gradient_NO, weight_XIO.swapaxes(1, 2), sizes_X)
    weight_gradient = jax.lax.platform_dependent(x_NI, gradient_NO, sizes_X, tpu=_tpu_outer, default=_outer)
    return x_gradient.astype(x_NI.dtype), weight_gradient.astype(weight_XIO.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _outer(x_NI: jax.Array, gradient_NO: jax.Array, sizes_X: jax.Array) -> jax.Array:
    """Return the products of the rows of each group, [X, I, O]."""
    dims = jax.lax.RaggedDotDimensionNumbers(
        (((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )
    return jax.lax.ragged_dot_general(x_NI, gradient_NO, sizes_X, dims)


def _tpu_outer(x_NI: jax.Array, gradient_NO: jax.Array, sizes_X: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows = len(x_NI)
    tile = min(ROWS, -(-rows // 128) * 128)
    padding = ((0, -rows % tile), (0, 0))  # rows behind the last group belong to no group
    x_NI, gradient_NO = jnp.pad(x_NI, padding), jnp.pad(gradient_NO, padding)
    tiling = (tile, min(INPUTS, x_NI.shape[1]), min(OUTPUTS, gradient_NO.shape[1]))
    with jax.numpy_dtype_promotion("standard"):  # the kernel is written for it
        made: jax.Array = tgmm(x_NI.swapaxes(0, 1), gradient_NO, sizes_X, x_NI.dtype, tiling)
    return made
