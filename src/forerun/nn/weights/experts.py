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
from forerun.nn.grouped_matmul import grouped_matmul

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
