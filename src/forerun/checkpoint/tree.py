"""Does a saved tree fit the job's? Compared leaf by leaf, by name, shape and dtype, before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Difference:
    """The first leaf that differs; None where one side does not have it."""

    name: str
    saved: Leaf | None
    wanted: Leaf | None


def first_difference(saved: Any, wanted: Any) -> Difference | None:
    """`saved` is what the checkpoint says of itself (nested dicts and lists), `wanted` the job's pytree of shapes."""
    have, want = dict(_saved_leaves(saved, ())), dict(_wanted_leaves(wanted))
    for name in (*want, *(name for name in have if name not in want)):
        if have.get(name) != want.get(name):
            return Difference(name, have.get(name), want.get(name))
    return None


def _wanted_leaves(tree: Any) -> Iterator[tuple[str, Leaf]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        yield jax.tree_util.keystr(path, simple=True, separator="."), Leaf(tuple(leaf.shape), str(leaf.dtype))


def _saved_leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Leaf]]:
    if tree is None:
        return
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _saved_leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _saved_leaves(value, (*path, str(index)))
    else:
        yield ".".join(path), Leaf(tuple(tree.shape), str(tree.dtype))
