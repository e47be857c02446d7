"""Selection of matrices by the target names of a job, which are names of forerun or of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from forerun.config.methods.targets import ALL_LINEAR
from forerun.errors import UserError
from forerun.models.keys import path_text, table_path
from forerun.nn.spec import Tree
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.nn.weights.quantized import Quantized


def is_linear(weight: Any) -> bool:
    """Return whether a leaf is the matrix of a linear layer: dense, fake-quantized or quantized.

    A read-out matrix is not a linear layer here.
    """
    return isinstance(weight, Quantized) or (isinstance(weight, Dense | FakeQuantized) and weight.value.inputs > 0)


def chosen_paths(specs: Tree, patterns: Sequence[str], names: Mapping[str, str], key: str) -> set[str]:
    """Return the paths of the matrices that match at least one pattern.

    Args:
        specs: The model's specs.
        patterns: Names, patterns with wildcards, or "all-linear".
        names: The path of each weight, with its name in transformers.
        key: The job's key for the patterns, for errors.

    Raises:
        UserError: A pattern matches no matrix.
    """
    flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_weight)
    linear = [path_text(path) for path, leaf in flat if is_linear(leaf)]
    found: set[str] = set()
    for pattern in patterns:
        matched = {path for path in linear if pattern == ALL_LINEAR or _is_called(path, names, pattern)}
        if not matched:
            raise _no_match(pattern, linear, names, key)
        found |= matched
    return found


def _is_called(path: str, names: Mapping[str, str], pattern: str) -> bool:
    block = table_path(path)  # targets do not distinguish the stacks
    name = names.get(block, "")
    called = (path, block, path.rpartition(".")[2], name, name.rpartition(".")[2])
    return any(fnmatchcase(one, pattern) for one in called if one)


def _no_match(pattern: str, linear: list[str], names: Mapping[str, str], key: str) -> UserError:
    called = {name for path in linear for name in (path, names.get(path, path))}
    known = sorted({name.rpartition(".")[2] for name in called})
    return UserError(
        "E-METHOD-003",
        f"{key}: no matrix is called {pattern!r}",
        why=f"this model has {', '.join(known)}" if known else f"this model has no matrices for {key}",
        fix=f"use one of these names, or {ALL_LINEAR!r}",
    )
