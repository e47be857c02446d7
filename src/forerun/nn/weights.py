"""Weights as leaf types: what a matrix is made of is the leaf's affair, not the model's.

A model says `contract("BSE,EHD->BSHD", x, block.query)`. Today the leaf is `Dense`; a low-rank
adapter or a quantized base is another class with the same two methods, put in by a transform over
specs, and no model changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from forerun.nn import sharding

T = TypeVar("T")


class Weight(Protocol):
    def matrix(self, axes: str, dtype: Any) -> jax.Array:
        """The dense matrix in the computing dtype, ready for use on this mesh."""

    def contract(self, equation: str, x: jax.Array) -> jax.Array:
        """`einsum(equation, x, matrix)` by whatever way is cheapest for this leaf."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Generic[T]):
    """A plain matrix. `T` is a ParamSpec, an abstract shape, a sharding or an array."""

    value: T

    def matrix(self: Dense[jax.Array], axes: str, dtype: Any) -> jax.Array:
        return sharding.gather(self.value.astype(dtype), axes)

    def contract(self: Dense[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        axes = equation.split("->")[0].split(",")[1]
        return jnp.einsum(equation, x, self.matrix(axes, x.dtype))


def contract(equation: str, x: jax.Array, weight: Weight) -> jax.Array:
    """Multiply by a weight, and lay the result out by its letters."""
    return sharding.constrain(weight.contract(equation, x), equation.split("->")[1])
