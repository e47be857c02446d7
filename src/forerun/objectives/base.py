"""What an objective is to the rest of forerun: sums over one micro-batch, so that micro-batches add up.

An objective of your own needs exactly `__call__`. What an objective may have besides is in `Objective`'s other
members, which `Plain` gives for those that need none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import jax

from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree
from forerun.objectives.batch import Batch

LOSS = "loss"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """A step's loss is loss / weight over all micro-batches; `told` are further sums, divided alike, for the log."""

    loss: jax.Array
    weight: jax.Array
    told: dict[str, jax.Array] = field(default_factory=dict)

    def named(self, name: str) -> jax.Array:
        return self.loss if name == LOSS else self.told[name]


class Objective(Protocol):
    @property
    def unit(self) -> str:
        """What the weight of its sums counts."""

    @property
    def nats(self) -> str | None:
        """Which of its sums is the text's negative log-likelihood in nats, so that there is a perplexity: `loss`, or a
        name of `told`. None: none of them, and no perplexity is told."""

    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        """Pure. `params` is what `specs` made of the model's specs, with arrays for leaves."""

    def specs(self, specs: Tree) -> Tree:
        """The model's specs, or those with a companion beside them (`companion.py`)."""

    def reads(self) -> dict[str, Tree]:
        """Specs of what is read from files besides the model, by name."""

    def start(self, params: Tree, given: Mapping[str, Tree]) -> Tree:
        """Arrays for `specs`, from the model's and from what was read from files by name."""

    def own(self, params: Tree) -> Tree:
        """The model's part of `params`."""

    def extras(self, rows: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What a batch has besides the five arrays, each [rows, ...]."""

    def flops_per_token(self, model: Model, sequence: int) -> float:
        """Forward and backward of all that the step computes, as `Model.flops_per_token` counts."""


class Plain:
    """An objective of the model alone, on the five arrays."""

    unit: ClassVar[str] = "tokens"
    nats: ClassVar[str | None] = None

    def specs(self, specs: Tree) -> Tree:
        return specs

    def reads(self) -> dict[str, Tree]:
        return {}

    def start(self, params: Tree, given: Mapping[str, Tree]) -> Tree:
        return params

    def own(self, params: Tree) -> Tree:
        return params

    def extras(self, rows: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {}

    def flops_per_token(self, model: Model, sequence: int) -> float:
        return model.flops_per_token(sequence)
