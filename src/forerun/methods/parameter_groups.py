"""Parameter groups: the parameters that `optimizer.groups` of a job selects by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

from forerun.config.optimizer import ParamGroup
from forerun.errors import UserError
from forerun.models.keys import path_text, table_path
from forerun.nn import spec
from forerun.nn.spec import Tree

_PEFT = {"down": "lora_A", "up": "lora_B"}  # names of an adapter's matrices in PEFT


def group_numbers(specs: Tree, groups: Sequence[ParamGroup], names: Mapping[str, str]) -> Tree:
    """Return the tree with the index of its group in place of each spec, -1 for a parameter of no group.

    Args:
        specs: The specs of a run.
        groups: The job's groups. A parameter belongs to the first group that matches.
        names: The path of each weight, with its name in transformers.

    Raises:
        UserError: A pattern matches no trainable parameter.
    """
    flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=spec.is_spec)
    called = {path: parameter_names(path_text(path), names) for path, leaf in flat if leaf.trainable}
    for group in groups:
        for pattern in group.patterns:
            if not any(_matches(pattern, each) for each in called.values()):
                raise _no_match(pattern, called)

    def number(path: Any, _: Any) -> int:
        for index, group in enumerate(groups):
            if path in called and any(_matches(pattern, called[path]) for pattern in group.patterns):
                return index
        return -1

    return jax.tree_util.tree_map_with_path(number, specs, is_leaf=spec.is_spec)


def parameter_names(path: str, names: Mapping[str, str]) -> list[str]:
    """Return all names of a parameter: its path, its name in transformers, and the last part of each.

    An adapter has the names of its matrix and its own: `query`, `q_proj`, `blocks.query.up`, `lora_B`.
    """
    path = table_path(path)
    parts = path.split(".")
    inner = [part for part in parts if part not in ("value", "base")]
    found = [".".join(inner)]
    if inner[-1] in _PEFT and len(inner) > 2:
        found += [_PEFT[inner[-1]], ".".join(inner[:-1]), inner[-2]]
    else:
        found.append(inner[-1])
    for start in range(len(inner)):
        for stop in range(len(inner), start, -1):
            if name := names.get(".".join(inner[start:stop]), ""):
                found += [name, name.rpartition(".")[2]]
    return list(dict.fromkeys(found))


def _matches(pattern: str, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _no_match(pattern: str, called: Mapping[Any, Sequence[str]]) -> UserError:
    known = sorted({names[0] for names in called.values()})
    return UserError(
        "E-METHOD-030",
        f"optimizer.groups: no trained parameter is called {pattern!r}",
        why=f"this job trains {', '.join(known)}",
        fix="use one of these names, the name of a module in transformers, or a pattern such as '*norm'",
    )
