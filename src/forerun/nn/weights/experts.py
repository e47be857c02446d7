"""The matrices of all experts of a layer as one weight, multiplied by groups of tokens.

X experts, I input dimension, O output dimension, N rows. The rows are sorted by expert: the first `sizes_X[0]` rows
belong to expert 0, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.nn import sharding
from forerun.nn.grouped_matmul import grouped_matmul
from forerun.nn.weights.lowrank import LowRank

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


def is_experts(weight: object) -> bool:
    """Return whether a weight is one matrix per expert, with or without an adapter."""
    return isinstance(weight, Experts) or (isinstance(weight, LowRank) and is_experts(weight.base))


def grouped(x_NI: jax.Array, weight: Any, sizes_X: jax.Array) -> jax.Array:
    """Return each row multiplied by the matrix of its expert and by the adapter of this matrix, [N, O].

    The product with the adapter has two grouped matmuls of the adapter's rank.
    """
    if not isinstance(weight, LowRank):
        made: jax.Array = weight.grouped(x_NI, sizes_X)
        return made
    low_NR = grouped_matmul(x_NI, weight.down.astype(x_NI.dtype), sizes_X)
    more_NO = grouped_matmul(low_NR, (weight.scale * weight.up).astype(x_NI.dtype), sizes_X)
    return grouped(x_NI, weight.base, sizes_X) + more_NO


def array_axes(weight: Any, axes: str) -> Any:
    """Return the weight with the letters of each of its arrays in place of the array. `axes` has no layers."""
    if isinstance(weight, LowRank):
        return replace(weight, base=array_axes(weight.base, axes), down=f"{axes[:2]}R", up=f"{axes[0]}R{axes[2]}")
    return replace(weight, value=axes)
