"""Weights as leaf types: what a matrix is made of is the leaf's affair, not the model's.

A model says `contract("BSE,EHD->BSHD", x, block.query)`. The leaf is `Dense` unless a method puts another one in its
place by a transform over specs: a low-rank adapter (`lowrank.py`) or a quantized base is another class with the same
two methods, and no model changes.
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
        given, result = equation.split("->")
        own, axes = given.split(",")
        matrix = self.matrix(axes, x.dtype)
        summed = [letter for letter in axes if letter in own]
        if len(summed) == 1 or result != "".join(letter for letter in own + axes if letter not in summed):
            return jnp.einsum(equation, x, matrix)
        # Over several dimensions, in the order of the weight: einsum takes its own order and transposes the weight.
        dims = tuple(own.index(letter) for letter in summed), tuple(axes.index(letter) for letter in summed)
        return jax.lax.dot_general(x, matrix, (dims, ((), ())))


def is_weight(value: object) -> bool:
    return isinstance(value, Weight)


def map_weights(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with every weight leaf (outermost, where one wraps another) replaced; all else stays."""
    return jax.tree.map(lambda leaf: function(leaf) if is_weight(leaf) else leaf, tree, is_leaf=is_weight)


def contract(equation: str, x: jax.Array, weight: Weight) -> jax.Array:
    """Multiply by a weight, and lay the result out by its letters."""
    return sharding.constrain(weight.contract(equation, x), equation.split("->")[1])
