"""Parameter specs: descriptions of a model's parameters before any array exists.

A model is a tree of `ParamSpec`. Three things are derived from this tree: abstract shapes (for `plan`), shardings (see
`sharding.py`) and initial arrays (for `train`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

LEADING = "LX"  # letters of layers and of experts: each of them has its own matrix
Tree = Any  # a pytree; the docstring of a function says which leaves it has


class Init(Protocol):
    """A function that returns initial values."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array: ...


@dataclass(frozen=True)
class Normal:
    """Independent normal values. Their scale does not depend on the shape, so stacking layers does not change it."""

    std: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (self.std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@dataclass(frozen=True)
class LogUniform:
    """Logarithms of independent values that are uniform between two limits."""

    low: float
    high: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        drawn = jax.random.uniform(key, shape, jnp.float32, self.low, self.high)
        return jnp.log(drawn).astype(dtype)


@dataclass(frozen=True)
class Fill:
    """One constant for all values, for example 0 for biases and 1 for norms."""

    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


@dataclass(frozen=True)
class ParamSpec:
    """The description of one parameter.

    Attributes:
        shape: The dimensions of the array.
        axes: One letter for each dimension, as in the equations of the model (`"EHD"`). The sharding rules read them.
        init: The function that returns initial values.
        dtype: The dtype of the array.
        trainable: Whether the optimizer updates it.
        decay: Whether weight decay applies to it.
        inputs: For a matrix, the number of leading dimensions that a contraction sums over (not counting L); the others
            are outputs. 0 for a read-out matrix: the loss uses it directly, so no method may replace it.
        saved: Whether checkpoints contain it. A base model under an adapter or a teacher is read from its own files
            again when a run resumes.
        keeps_dtype: Whether `cast` leaves the dtype, for a small parameter whose rounding matters.
    """

    shape: tuple[int, ...]
    axes: str
    init: Init
    dtype: Any = jnp.float32
    trainable: bool = True
    decay: bool = True
    inputs: int = 1
    saved: bool = True
    keeps_dtype: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.shape)} dimensions but axes {self.axes!r}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def lead(self) -> int:
        """The number of dimensions before those of one matrix: layers and experts."""
        return next((n for n, letter in enumerate(self.axes) if letter not in LEADING), len(self.axes))


def is_spec(value: object) -> bool:
    return isinstance(value, ParamSpec)


def map_specs(function: Callable[[ParamSpec], Any], specs: Tree) -> Tree:
    """Return the tree with `function` applied to every spec."""
    return jax.tree.map(function, specs, is_leaf=is_spec)


def stack(specs: Tree, layers: int) -> Tree:
    """Return specs with a leading layer dimension: the same parameters for each of `layers` layers."""
    return map_specs(lambda s: replace(s, shape=(layers, *s.shape), axes="L" + s.axes), specs)


def cast(specs: Tree, dtype: Any) -> Tree:
    """Return the specs with another dtype, except for those that keep their own."""
    return map_specs(lambda s: s if s.keeps_dtype else replace(s, dtype=dtype), specs)


def initial(specs: Tree, key: jax.Array) -> Tree:
    """Return a tree of initial arrays.

    The random key of a leaf is derived from its path, so adding or removing other leaves does not change it.
    """

    def leaf(path: Any, spec: ParamSpec) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return spec.init(jax.random.fold_in(key, zlib.crc32(name.encode())), spec.shape, spec.dtype)

    return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_spec)


def count(specs: Tree) -> int:
    """Return the number of elements of all parameters."""
    return sum(s.size for s in jax.tree.leaves(specs, is_leaf=is_spec))


def split(tree: Tree, mask: Tree) -> tuple[Tree, Tree]:
    """Return two trees: the leaves where `mask` is true, and the others. Each has None in place of missing leaves."""
    chosen = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree)
    rest = jax.tree.map(lambda keep, leaf: None if keep else leaf, mask, tree)
    return chosen, rest


def merge(chosen: Tree, rest: Tree) -> Tree:
    """Return the tree that `split` divided into `chosen` and `rest`."""
    return jax.tree.map(lambda a, b: b if a is None else a, chosen, rest, is_leaf=lambda x: x is None)
