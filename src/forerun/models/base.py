"""The model protocol, and the capabilities that a model may declare.

A custom model (`model: module.path:Class` in the job file) implements `Model` and passes the same contract test as
forerun's own models. It may also declare `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from forerun.errors import UserError
from forerun.models.layer_kinds import LayerKind
from forerun.nn.compute import Compute
from forerun.nn.layers import soft_cap
from forerun.nn.rope import LongRope
from forerun.nn.routing import Routing
from forerun.nn.spec import Tree


@dataclass(frozen=True)
class Readout:
    """The result of a model before the logits: hidden states and output matrix.

    The full logits of a batch may not fit in memory, so a loss computes them in chunks.
    """

    hidden_BSE: jax.Array
    matrix_VE: jax.Array  # already in the compute dtype
    softcap: float | None = None
    told: Mapping[str, jax.Array] = field(default_factory=dict)  # further metrics by name, a value per token [B, S]
    routing: Routing[jax.Array] | None = None  # None: the model has no experts

    def logits(self) -> jax.Array:
        """Return all logits, [B, S, V] in float32. Use it for a few tokens only, never for a training batch."""
        # The matrix is the first operand: for a few rows, XLA's CPU code then takes half the time.
        logits_VBS = jax.lax.dot_general(
            self.matrix_VE, self.hidden_BSE, (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32
        )
        return soft_cap(jnp.moveaxis(logits_VBS, 0, -1), self.softcap)


@dataclass(frozen=True)
class Capabilities:
    """Properties of a model that decide how forerun compiles, plans and samples from it. Read by `capabilities_of`.

    Attributes:
      layers: The size of the leading layer dimension of stacked weights, or None if no weights are stacked.
      positions: The largest number of positions that the model accepts, or None for no limit.
      attention_softcap: The soft cap on attention scores, or None. Not every attention kernel has one.
      attention_sinks: Whether heads have learned sinks. Not every attention kernel has them.
      layer_kinds: One period of the layers' windows and position embeddings, or () if they are unknown.
      has_cache: Whether the model has `cache` and `extend`, which generate tokens without recomputing earlier ones.
      splits_sequences: Whether the model computes with sequences that `mesh.context` splits.
      has_experts: Whether the layers have a mixture of experts.
    """

    layers: int | None = None
    positions: int | None = None
    attention_softcap: float | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    has_cache: bool = False
    splits_sequences: bool = False
    has_experts: bool = False
    attention_sinks: bool = False

    @property
    def rope_switch(self) -> int | None:
        """The length beyond which LongRope rotates all tokens of a row differently, or None without LongRope."""
        ropes = [kind.rope for kind in self.layer_kinds if kind.rope]
        return min((rope.scaling.original for rope in ropes if isinstance(rope.scaling, LongRope)), default=None)


class Model(Protocol):
    """The members that every model has. A model is immutable and holds dimensions, never arrays."""

    @property
    def vocab(self) -> int: ...

    @property
    def heads(self) -> int | None:
        """The number of query heads, which tensor parallelism splits, or None for a model without heads."""

    def specs(self) -> Tree:
        """Return the parameters as a tree of ParamSpec."""

    def apply(
        self, params: Any, tokens_BS: jax.Array, segments_BS: jax.Array, positions_BS: jax.Array, compute: Compute
    ) -> Readout:
        """Return the hidden states and the output matrix. The function must be pure.

        Args:
            params: Arrays in the structure of `specs()`.
            tokens_BS: Token ids.
            segments_BS: The document of each position in a packed row.
            positions_BS: The position of each token in its document.
            compute: The dtype, attention kernel and remat policy.
        """

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs per token of a forward and backward pass at this sequence length, for MFU.

        Causal attention counts only the visible half of the scores, and recomputation is not counted.
        """


class ModelWithCapabilities(Model, Protocol):
    """A model that declares its capabilities, as forerun's own models do. A custom model may."""

    @property
    def capabilities(self) -> Capabilities: ...


def capabilities_of(model: Model) -> Capabilities:
    """Return the capabilities that `model` declares, or defaults for a model that declares none.

    The defaults come from the model's `config`, if it has one, and from its members `cache` and `extend`.
    """
    if hasattr(model, "capabilities"):
        return _declared(model)
    config = getattr(model, "config", None)
    return Capabilities(
        layers=getattr(config, "layers", None),
        positions=getattr(config, "positions", None),
        attention_softcap=getattr(config, "attention_softcap", None),
        layer_kinds=getattr(config, "layer_kinds", ()),
        has_cache=hasattr(model, "cache") and hasattr(model, "extend"),
    )


def require_split_sequences(model: Model, context: int) -> None:
    """Raise if a sequence is split over devices, and the model cannot compute with its parts."""
    capabilities = capabilities_of(model)
    if context == 1 or capabilities.splits_sequences:
        return
    recurrent = any(kind.mixer != "attention" for kind in capabilities.layer_kinds)
    raise UserError(
        "E-MODEL-050",
        f"mesh.context={context} splits sequences, which {type(model).__name__} cannot compute with",
        why="its recurrent layers pass a state from each token to the next one"
        if recurrent
        else "its router counts the tokens of complete sequences"
        if capabilities.has_experts
        else "the model does not declare the capability splits_sequences",
        fix="set mesh.context=1; use mesh.fsdp and mesh.tp for more memory",
    )


def _declared(model: Any) -> Capabilities:
    """Return `model.capabilities`, or raise a UserError if it has another type."""
    declared = model.capabilities
    if isinstance(declared, Capabilities):
        return declared
    raise UserError(
        "E-MODEL-019",
        f"{type(model).__name__}.capabilities has the type {type(declared).__name__}, not Capabilities",
        why="forerun reads the soft cap, the positions and the layers of a model from this property",
        fix="make it a property that returns forerun.models.base.Capabilities(...), or rename it",
    )
