"""The layout of each parameter for optimizers that treat matrices as matrices: Muon, Adafactor and AdamW with 8 bits.

A parameter of forerun has more dimensions than the matrix that it represents: layers are stacked, and heads have their
own dimension. `query` is [L, E, H, D] for L matrices of E rows and H x D columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

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
