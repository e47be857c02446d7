"""Which matrices a section of the job means: by their own names, or by those that transformers gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from forerun.config.targets import ALL_LINEAR
from forerun.errors import UserError
from forerun.models.keys import path_text
from forerun.nn.fakequant import FakeQuantized
from forerun.nn.quantized import Quantized
from forerun.nn.spec import Tree
from forerun.nn.weights import Dense, is_weight


def is_linear(weight: Any) -> bool:
    """A matrix that multiplies: plain, rounded or in few bits; a read-out is used whole and is none."""
    return isinstance(weight, Quantized) or (isinstance(weight, Dense | FakeQuantized) and weight.value.inputs > 0)


def chosen_paths(specs: Tree, patterns: Sequence[str], names: Mapping[str, str], key: str) -> set[str]:
    """The paths of the matrices that any pattern means. `names`: what transformers calls the weights, path by path;
    `key`: where the job says the patterns, for messages."""
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
    block = path.replace("tail.", "blocks.", 1)  # layers that make no whole period are layers like all others
    name = names.get(block, "")
    called = (path, block, path.rpartition(".")[2], name, name.rpartition(".")[2])
    return any(fnmatchcase(one, pattern) for one in called if one)


def _no_match(pattern: str, linear: list[str], names: Mapping[str, str], key: str) -> UserError:
    called = {name for path in linear for name in (path, names.get(path, path))}
    known = sorted({name.rpartition(".")[2] for name in called})
    return UserError(
        f"{key}: no matrix is called {pattern!r}",
        why=f"this model has {', '.join(known)}" if known else f"this model has no matrices that {key} could mean",
        fix=f"write one of them, or {ALL_LINEAR!r}",
    )
