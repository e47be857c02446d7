"""The matrices of all experts of a layer as one weight, multiplied by groups of tokens.

X experts, I input dimension, O output dimension, N rows. The rows are sorted by expert: the first `sizes_X[0]` rows
belong to expert 0, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.nn import sharding

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Experts(Generic[T]):
    """One matrix per expert. `T` is a ParamSpec, an abstract shape, a sharding or an array."""

    value: T  # [X, I, O]; layers may come first
    share: float = field(metadata={"static": True})  # of the experts that each token uses

    def matrix(self: Experts[jax.Array], axes: str, dtype: Any) -> jax.Array:
        return sharding.gather(self.value.astype(dtype), axes)

    def contract(self: Experts[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, self.matrix(equation.split("->")[0].split(",")[1], x.dtype))

    def grouped(self: Experts[jax.Array], x_NI: jax.Array, sizes_X: jax.Array) -> jax.Array:
        """Return each row multiplied by the matrix of its expert, [N, O]."""
        return grouped_matmul(x_NI, self.value.astype(x_NI.dtype), sizes_X)


# ---- Products of groups of rows with one matrix each ----


# Tiles of rows, inputs and outputs in the kernel for the weights' gradient. They need 8 MiB of on-chip memory.
ROWS, INPUTS, OUTPUTS = 512, 512, 1024


@jax.custom_vjp
def grouped_matmul(x_NI: jax.Array, weight_XIO: jax.Array, sizes_X: jax.Array) -> jax.Array:
    """Return each row multiplied by the matrix of its group, [N, O].

    The TPU compiler has a kernel for `ragged_dot`, but it computes the gradient of the weights that JAX derives with
    all rows for every group: X times too many FLOPs. So this gradient has a Pallas kernel on TPUs.
    """
    return jax.lax.ragged_dot(x_NI, weight_XIO, sizes_X)


def _grouped_forward(x_NI: jax.Array, weight_XIO: jax.Array, sizes_X: jax.Array) -> tuple[jax.Array, Any]:
    return grouped_matmul(x_NI, weight_XIO, sizes_X), (x_NI, weight_XIO, sizes_X)


def _grouped_backward(kept: Any, gradient_NO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_NI, weight_XIO, sizes_X = kept
    x_gradient = jax.lax.ragged_dot(gradient_NO, weight_XIO.swapaxes(1, 2), sizes_X)
    weight_gradient = jax.lax.platform_dependent(x_NI, gradient_NO, sizes_X, tpu=_tpu_outer, default=_outer)
    return x_gradient.astype(x_NI.dtype), weight_gradient.astype(weight_XIO.dtype), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


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
