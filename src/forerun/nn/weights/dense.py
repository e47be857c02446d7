"""The protocol of weight leaf types, and the dense weight.

A model calls `contract("BSE,EHD->BSHD", x, block.query)` and does not know how the matrix is represented. The leaf is
`Dense` unless a method replaces it by a transform over specs. A low-rank adapter (`lowrank.py`) or a quantized base is
another class with the same two methods, so no model has to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp

from forerun.nn import sharding
from forerun.nn.spec import Tree

T = TypeVar("T")


@runtime_checkable
class Weight(Protocol):
    """The interface of a weight leaf."""

    def matrix(self, axes: str, dtype: Any) -> jax.Array:
        """Return the dense matrix in `dtype`, gathered for use on the ambient mesh."""

    def contract(self, equation: str, x: jax.Array) -> jax.Array:
        """Return `einsum(equation, x, matrix)`, computed in the cheapest way for this leaf."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Generic[T]):
    """A plain matrix. `T` is a ParamSpec, an abstract shape, a sharding or an array."""

    value: T

    def matrix(self: Dense[jax.Array], axes: str, dtype: Any) -> jax.Array:
        return sharding.gather(self.value.astype(dtype), axes)

    def contract(self: Dense[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        given, result = equation.split("->")
        own, axes = given.split(",")
        matrix = self.matrix(axes, x.dtype)
        summed = [letter for letter in axes if letter in own]
        if len(summed) == 1 or result != "".join(letter for letter in own + axes if letter not in summed):
            return jnp.einsum(equation, x, matrix)
        # Sum over several dimensions in the order of the weight. `einsum` would choose another order and transpose
        # the weight.
        dims = tuple(own.index(letter) for letter in summed), tuple(axes.index(letter) for letter in summed)
        return jax.lax.dot_general(x, matrix, (dims, ((), ())))


def as_weight(value: Any) -> Any:
    """Return a weight leaf as it is, and an array as a dense weight."""
    return value if is_weight(value) else Dense(value)


def is_weight(value: object) -> bool:
    return isinstance(value, Weight)


def map_weights(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return the tree with `function` applied to every weight leaf; other leaves stay.

    If a weight contains another one, only the outer one is replaced.
    """
    return jax.tree.map(lambda leaf: function(leaf) if is_weight(leaf) else leaf, tree, is_leaf=is_weight)


def contract(equation: str, x: jax.Array, weight: Weight) -> jax.Array:
    """Return `x` multiplied by a weight, with the sharding that the letters of the result imply."""
    return sharding.constrain(weight.contract(equation, x), equation.split("->")[1])
