"""Comparison of a saved tree with the job's, by name, shape and dtype of each leaf, before any array is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


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


def in_saved_form(saved: Any, wanted: Any) -> Any:
    """Return the leaves of the job's tree in the structure of the checkpoint.

    Orbax also compares places without an array. A newer version has more of them, such as parameters that only one
    family has.

    Args:
      saved: metadata of the checkpoint, as nested dicts and lists. Its leaves have the names of the job's.
      wanted: the job's pytree of shapes.
    """
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}

    def part(node: Any, path: tuple[str, ...]) -> Any:
        if node is None:
            return None
        if isinstance(node, dict):
            return {key: part(value, (*path, str(key))) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [part(value, (*path, str(index))) for index, value in enumerate(node)]
        return leaves[".".join(path)]

    return part(saved, ())


def in_job_form(loaded: Any, wanted: T) -> T:
    """Return the arrays of a checkpoint in the structure of the job's tree.

    Args:
      loaded: the arrays in the structure of the checkpoint.
      wanted: the job's pytree of shapes, with the same names of leaves.
    """
    arrays = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(loaded)}
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name(path)], wanted)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _wanted_leaves(tree: Any) -> Iterator[tuple[str, SavedLeaf]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)  # keys are saved as integers
        yield _name(path), SavedLeaf(tuple(leaf.shape), str(leaf.dtype))


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
