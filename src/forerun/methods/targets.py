"""Selection of matrices by the target names of a job, which are names of forerun or of transformers."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from forerun.config.training_method import ALL_LINEAR
from forerun.errors import UserError
from forerun.models.keys import path_text, table_path
from forerun.nn.spec import Tree
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.experts import Experts
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.nn.weights.quantized import Quantized

SUGGESTIONS = 3


def is_linear(weight: Any) -> bool:
    """Return whether a leaf is the matrix of a linear layer: dense, fake-quantized or quantized, or all experts.

    A read-out matrix is not a linear layer here.
    """
    if isinstance(weight, Quantized):
        return True
    return isinstance(weight, (Dense, FakeQuantized, Experts)) and weight.value.inputs > 0


def linear_paths(specs: Tree) -> list[str]:
    """Return the paths of all matrices that can be targets."""
    flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_weight)
    return [path_text(path) for path, leaf in flat if is_linear(leaf)]


def chosen_paths(
    specs: Tree, patterns: Sequence[str], names: Mapping[str, str], key: str, optional: Collection[str] = ()
) -> set[str]:
    """Return the paths of the matrices that match at least one pattern.

    Args:
        specs: The model's specs.
        patterns: Names, patterns with wildcards, or "all-linear".
        names: The path of each weight in the family's table, with its name in transformers.
        key: The job's key for the patterns, for errors.
        optional: Paths in the family's table that "all-linear" leaves out. Their own names select them.

    Raises:
        UserError: A pattern matches no matrix.
    """
    linear = linear_paths(specs)
    found: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            matched = {path for path in linear if table_path(path) not in optional}
        else:
            matched = {path for path in linear if _is_called(path, names, pattern)}
        if not matched:
            raise _no_match(pattern, linear, names, key)
        found |= matched
    return found


def module_name(path: str, names: Mapping[str, str]) -> str:
    """Return the short name of a matrix: that of its module in transformers, or the last part of its path."""
    return names.get(table_path(path), path).rpartition(".")[2]


def _is_called(path: str, names: Mapping[str, str], pattern: str) -> bool:
    """Return whether a pattern matches a name of a matrix, or the last parts of a name, as in PEFT."""
    block = table_path(path)  # targets do not distinguish the stacks of layers, unless a pattern names one
    called = (path, block, names.get(block, ""))
    return any(fnmatchcase(one, pattern) or fnmatchcase(one, f"*.{pattern}") for one in called if one)


def _no_match(pattern: str, linear: list[str], names: Mapping[str, str], key: str) -> UserError:
    called = {name for path in linear for name in (path, names.get(table_path(path), path))}
    known = sorted({name.rpartition(".")[2] for name in called})
    near = difflib.get_close_matches(pattern.rpartition(".")[2], known, n=SUGGESTIONS, cutoff=0.5)
    nearest = (
        f"use {' or '.join(near)}, which are the nearest names" if len(near) > 1 else f"use {near[0]}" if near else ""
    )
    return UserError(
        "E-METHOD-003",
        f"{key}: no matrix is called {pattern!r}",
        why=f"this model has {', '.join(known)}" if known else f"this model has no matrices for {key}",
        fix=f"{nearest or 'use one of these names'}, or {ALL_LINEAR!r}",
    )
