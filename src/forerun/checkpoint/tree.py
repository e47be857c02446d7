"""Comparison of a saved tree with the job's, by name, shape and dtype of each leaf, before any array is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class SavedLeaf:
    """Shape and dtype of an array, printed for example as `float32[32000,512]`."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Difference:
    """A leaf that differs; `saved` or `wanted` is None if that side does not have it."""

    name: str
    saved: SavedLeaf | None
    wanted: SavedLeaf | None


def first_difference(saved: Any, wanted: Any) -> Difference | None:
    """Return the first leaf that differs, or None.

    Args:
      saved: metadata of the checkpoint, as nested dicts and lists.
      wanted: the job's pytree of shapes.
    """
    have, want = dict(_saved_leaves(saved, ())), dict(_wanted_leaves(wanted))
    for name in (*want, *(name for name in have if name not in want)):
        if have.get(name) != want.get(name):
            return Difference(name, have.get(name), want.get(name))
    return None


def _wanted_leaves(tree: Any) -> Iterator[tuple[str, SavedLeaf]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # keys are saved as integers
        yield jax.tree_util.keystr(path, simple=True, separator="."), SavedLeaf(tuple(leaf.shape), str(leaf.dtype))


def _saved_leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, SavedLeaf]]:
    if tree is None:
        return
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _saved_leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _saved_leaves(value, (*path, str(index)))
    else:
        yield ".".join(path), SavedLeaf(tuple(tree.shape), str(tree.dtype))
