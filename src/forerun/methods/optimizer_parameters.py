"""What optimizers know about each parameter: its layout as a matrix, and its parameter group.

Muon, Adafactor and AdamW with 8 bits treat matrices as matrices. A parameter of forerun has more dimensions than the
matrix that it represents: layers are stacked, and heads have their own dimension. `query` is [L, E, H, D] for L
matrices of E rows and H x D columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax

from forerun.config.optimizer import ParamGroup
from forerun.errors import UserError
from forerun.models.keys import path_text, table_path
from forerun.nn import spec
from forerun.nn.spec import ParamSpec, Tree
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.experts import Experts
from forerun.nn.weights.fakequant import FakeQuantized
from forerun.nn.weights.lowrank import LowRank


@dataclass(frozen=True)
class ParamLayout:
    """The dimensions of a parameter. It is a leaf of a tree, not a node."""

    shape: tuple[int, ...]
    axes: str
    lead: int  # number of first dimensions that are stacked layers or experts
    rows: int  # number of dimensions after `lead` that are the rows of a matrix; 0 for a norm or a bias
    is_linear: bool  # whether it is the matrix of a linear layer: not an embedding or a read-out

    @property
    def cut(self) -> int:
        """The index of the first dimension of the columns."""
        return self.lead + self.rows

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape as [layers x experts, rows, columns]."""
        layers, rows = math.prod(self.shape[: self.lead]), math.prod(self.shape[self.lead : self.cut])
        return layers, rows, math.prod(self.shape[self.cut :])


def layouts_of(specs: Tree) -> Tree:
    """Return the tree with a `ParamLayout` in place of each spec."""
    return jax.tree.map(_weight, specs, is_leaf=lambda x: is_weight(x) or spec.is_spec(x))


def _weight(weight: Any) -> Any:
    """Return the layouts of a weight, in its structure."""
    if isinstance(weight, LowRank):
        own = {"down": _layout(weight.down, weight.inputs, True), "up": _layout(weight.up, 1, True)}
        length = None if weight.length is None else _layout(weight.length, 0, False)
        return LowRank(
            base=_weight(weight.base),
            **own,
            length=length,
            inputs=weight.inputs,
            scale=weight.scale,
            dropout=weight.dropout,
        )
    if isinstance(weight, Dense | FakeQuantized | Experts):
        inputs = weight.value.inputs
        # Every other array of the weight, such as a learned scale, is no matrix.
        return jax.tree.map(
            lambda s: _layout(s, inputs or 1, inputs > 0) if s is weight.value else _layout(s, 0, False),
            weight,
            is_leaf=spec.is_spec,
        )
    return jax.tree.map(_plain, weight, is_leaf=spec.is_spec)


def _plain(s: ParamSpec) -> ParamLayout:
    """Return the layout of a parameter outside linear layers. Norms and biases, which have no decay, are vectors."""
    return _layout(s, 1 if s.decay and len(s.shape) - s.lead == 2 else 0, False)


def _layout(s: ParamSpec, rows: int, is_linear: bool) -> ParamLayout:
    lead = s.lead
    if len(s.shape) - lead <= rows:  # a matrix without columns is a vector
        rows, is_linear = 0, False
    return ParamLayout(s.shape, s.axes, lead, rows, is_linear)


# ---- Parameter groups: the parameters that `optimizer.groups` of a job selects by name ----


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
