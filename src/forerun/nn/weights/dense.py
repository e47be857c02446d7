"""The protocol of weight leaf types, and the dense weight.

A model calls `contract("BSE,EHD->BSHD", x, block.query)` and does not know how the matrix is represented. The leaf is
`Dense` unless a method replaces it by a transform over specs. A low-rank adapter (`lowrank.py`) or a quantized base is
another class with the same two methods, so no model has to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


# ---- A table with new rows: the old rows are frozen, and the new rows are trained ----
# V rows of the frozen table, N new rows, E embed. The new rows have the ids `first` to `first + N - 1`. A published
# vocabulary often has more rows than its tokenizer has ids; new rows then replace these spare rows.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Extended(Generic[T]):
    """A frozen table with trainable rows. `T` is a ParamSpec, an abstract shape, a sharding or an array."""

    base: T  # [V, E]
    rows: T  # [N, E]
    first: int = field(metadata={"static": True})
    is_embedding: bool = field(metadata={"static": True})  # the model's own leaf is an array, not a Dense

    def matrix(self: Extended[jax.Array], axes: str, dtype: Any) -> jax.Array:
        return sharding.gather(with_rows(self.base.astype(dtype), self.rows.astype(dtype), self.first), axes)

    def contract(self: Extended[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, self.matrix(equation.split("->")[0].split(",")[1], x.dtype))

    def lookup(self: Extended[jax.Array], tokens_BS: jax.Array, dtype: Any) -> jax.Array:
        """Return the embeddings of the tokens, [B, S, E]. The gradient of the new rows never has V rows."""
        is_new_BS = (tokens_BS >= self.first) & (tokens_BS < self.first + self.rows.shape[0])
        old_BSE = sharding.lookup(self.base, jnp.where(is_new_BS, 0, tokens_BS)).astype(dtype)
        new_BSE = sharding.lookup(self.rows, jnp.where(is_new_BS, tokens_BS - self.first, 0)).astype(dtype)
        return jnp.where(is_new_BS[..., None], new_BSE, old_BSE)


def with_rows(table_VE: jax.Array, rows_NE: jax.Array, first: int) -> jax.Array:
    """Return the table with rows `first` to `first + N - 1` replaced or appended. All other rows are unchanged."""
    parts = [table_VE[:first], rows_NE, table_VE[first + rows_NE.shape[0] :]]
    return jnp.concatenate([part for part in parts if part.shape[0]])


def mean_rows(table_VE: jax.Array, count: int, dtype: Any) -> jax.Array:
    """Return `count` rows that are the mean of all rows of the table, computed in float32.

    A new token then gets the average logit, so that it does not change the distribution of the others much
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html). transformers draws the rows from a normal distribution
    around the same mean, whose deviation is tiny. The mean alone is the same for every seed.
    """
    mean_E = jnp.mean(table_VE.astype(jnp.float32), axis=0)
    return jnp.broadcast_to(mean_E, (count, table_VE.shape[1])).astype(dtype)
