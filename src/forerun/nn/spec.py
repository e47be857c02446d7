"""Parameters declared as data before any array exists.

A model is a tree of `ParamSpec`. Three views come from that one tree: abstract shapes (for `plan`),
shardings (see `sharding.py`), and initial arrays (for `train`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Tree = Any  # a pytree whose leaves the signature's prose names


class Init(Protocol):
    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array: ...


@dataclass(frozen=True)
class Normal:
    """Independent normal entries, so that stacking layers changes nothing."""

    std: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (self.std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@dataclass(frozen=True)
class Fill:
    """Every entry the same: 0 for biases, 1 for norms."""

    value: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.full(shape, self.value, dtype)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, a letter per dimension, how it starts, and whether it learns.

    `axes` are the shape letters of the model's equations (`"EHD"`); the sharding rules read them. Of a matrix, `inputs`
    dimensions come first that a contraction sums over (0: it is used whole, as a read-out is), then its outputs.
    What is not `saved` comes from elsewhere again when a run goes on: the base model under an adapter, a teacher.
    """

    shape: tuple[int, ...]
    axes: str
    init: Init
    dtype: Any = jnp.float32
    trainable: bool = True
    decay: bool = True
    inputs: int = 1
    saved: bool = True

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.shape)} dimensions but axes {self.axes!r}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def is_spec(value: object) -> bool:
    return isinstance(value, ParamSpec)


def map_specs(function: Callable[[ParamSpec], Any], specs: Tree) -> Tree:
    return jax.tree.map(function, specs, is_leaf=is_spec)


def stack(specs: Tree, layers: int) -> Tree:
    """The same parameters once per layer, with the layer dimension first."""
    return map_specs(lambda s: replace(s, shape=(layers, *s.shape), axes="L" + s.axes), specs)


def cast(specs: Tree, dtype: Any) -> Tree:
    return map_specs(lambda s: replace(s, dtype=dtype), specs)


def abstract(specs: Tree) -> Tree:
    """Shapes and dtypes, no arrays."""
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)


def initial(specs: Tree, key: jax.Array) -> Tree:
    """Arrays. Each leaf's key comes from its own path, so no leaf depends on its neighbours."""

    def leaf(path: Any, spec: ParamSpec) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return spec.init(jax.random.fold_in(key, zlib.crc32(name.encode())), spec.shape, spec.dtype)

    return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=is_spec)


def count(specs: Tree) -> int:
    return sum(s.size for s in jax.tree.leaves(specs, is_leaf=is_spec))


def split(tree: Tree, mask: Tree) -> tuple[Tree, Tree]:
    """(where the mask is true, the rest), each with None in the other's places."""
    chosen = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree)
    rest = jax.tree.map(lambda keep, leaf: None if keep else leaf, mask, tree)
    return chosen, rest


def merge(chosen: Tree, rest: Tree) -> Tree:
    """Undo `split`."""
    return jax.tree.map(lambda a, b: b if a is None else a, chosen, rest, is_leaf=lambda x: x is None)
