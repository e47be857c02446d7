"""The interface of objectives. An objective returns sums over one micro-batch, so that micro-batches can be added.

A custom objective defines `__call__` and inherits the other members of `Objective` from `Plain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from forerun.config.training_method import CustomObjective
from forerun.errors import UserError
from forerun.models.base import Model, Readout
from forerun.models.plugin import Plugin, create_plugin
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree, map_specs
from forerun.objectives.batch import Batch

LOSS = "loss"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over a micro-batch. The loss of a step is sum(loss) / sum(weight) over all its micro-batches."""

    loss: jax.Array
    weight: jax.Array
    told: dict[str, jax.Array] = field(default_factory=dict)  # further metrics, also divided by the weight
    penalty: jax.Array | None = None  # added to the loss that is differentiated, and not to the metric

    @property
    def total(self) -> jax.Array:
        """The sum that is differentiated."""
        return self.loss if self.penalty is None else self.loss + self.penalty

    def named(self, name: str) -> jax.Array:
        """Return the sum with this name: `loss`, or a name of `told`."""
        return self.loss if name == LOSS else self.told[name]


def told_sums(readout: Readout, weights_BS: jax.Array) -> dict[str, jax.Array]:
    """Return the sums of a model's own metrics over the tokens with loss. They have no gradient."""

    def total(value_BS: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.stop_gradient(value_BS).astype(jnp.float32) * weights_BS.astype(jnp.float32))

    return {name: total(value_BS) for name, value_BS in readout.told.items()}


class Objective(Protocol):
    """A training objective."""

    @property
    def unit(self) -> str:
        """What the weight of its sums counts, for example `tokens`."""

    @property
    def nats(self) -> str | None:
        """Name of the sum that is the negative log-likelihood of the text in nats, from which perplexity is computed.

        It is `loss` or a name of `told`. None: there is no such sum, and no perplexity is reported.
        """

    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        """Return the sums over a micro-batch. This must be a pure function.

        Args:
          model: the trained model.
          params: arrays in the structure that `specs` returns.
          batch: one micro-batch; its arrays are [B, S] and [B, ...].
          compute: dtype, attention kernel and remat policy.
        """

    def specs(self, specs: Tree) -> Tree:
        """Return the specs of all parameters: the model's, and those of its companion if any (`WithCompanion`)."""

    def reads(self) -> dict[str, Tree]:
        """Return the specs of further models that are read from files, by name."""

    def start(self, params: Tree, given: Mapping[str, Tree]) -> Tree:
        """Return the arrays for `specs`, from the model's arrays and the files' (`given`, named as in `reads`)."""

    def own(self, params: Tree) -> Tree:
        """Return the part of `params` that is the trained model."""

    def extras(self, rows: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch's extra arrays by name, each [rows, ...]."""

    def flops_per_token(self, model: Model, sequence: int) -> float:
        """Return the FLOPs per token of a step, forward and backward, counted as in `Model.flops_per_token`."""


class Plain:
    """Base class of objectives that need only the model and the five arrays of a batch."""

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


T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WithCompanion(Generic[T]):
    """The parameters of the trained model and of its companion. `T` is a tree of specs, shapes, shardings or arrays."""

    own: T
    companion: T


def at_rest(specs: Tree, dtype: object) -> Tree:
    """Return the specs of a companion in `dtype`, without gradients and optimizer moments, and not saved."""
    return map_specs(lambda s: replace(s, dtype=dtype, trainable=False, saved=False), specs)


# ---- Custom objectives: instances of the class that the job's objective section names ----


# Methods that a custom objective must not override: the state and the batches of a run must not depend on a class that
# may be missing later.
FIXED = ("specs", "start", "own", "extras")
PLUGIN = Plugin(
    "objective",
    "objective.options",
    "chunk is added by forerun",
    needs=("__call__", "unit", "flops_per_token", *FIXED),
    protocol="forerun.objectives.base.Objective",
)


def custom_objective(section: CustomObjective, chunk: int) -> Objective:
    """Return an instance of the class that the job names as `module.path:Class`.

    Args:
      section: the objective section of the job.
      chunk: number of positions whose logits exist at one time. It is passed to the class, with the job's options.

    Raises:
      UserError: the class cannot be used, or it overrides one of the FIXED methods of `Plain`.
    """
    objective: Objective = create_plugin(section.name, {"chunk": chunk, **section.options}, PLUGIN)
    changed = [name for name in FIXED if getattr(type(objective), name, None) is not getattr(Plain, name)]
    if changed:
        raise UserError(
            "E-METHOD-004",
            f"objective {section.name!r}: its {changed[0]} is not that of Plain",
            why="a custom objective uses only the model's parameters and the five arrays of a batch",
            fix="derive it from forerun.objectives.base.Plain; define __call__, and optionally unit, flops_per_token",
        )
    return objective
