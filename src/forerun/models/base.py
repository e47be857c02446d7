"""What a model is to the rest of forerun: specs, apply, and what it costs.

A model of your own needs exactly this protocol (`model: module.path:Class` in the job file) and
passes the same contract test as ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from forerun.nn.compute import Compute
from forerun.nn.layers import soft_cap
from forerun.nn.spec import Tree


@dataclass(frozen=True)
class Readout:
    """The end of a model before any logit exists, so that the loss can take them a piece at a time."""

    hidden_BSE: jax.Array
    matrix_VE: jax.Array  # already in the computing dtype
    softcap: float | None = None

    def logits(self) -> jax.Array:
        """Return all logits, [B, S, V] in float32: for a few tokens, never for a training batch."""
        # The matrix comes first: for a few rows XLA's CPU compiler then needs half the time.
        logits_VBS = jax.lax.dot_general(
            self.matrix_VE, self.hidden_BSE, (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32
        )
        return soft_cap(jnp.moveaxis(logits_VBS, 0, -1), self.softcap)


class Model(Protocol):
    """Immutable; holds dimensions, never arrays."""

    @property
    def vocab(self) -> int: ...

    @property
    def heads(self) -> int | None:
        """Query heads, if tensor parallelism splits heads; None if it has none."""

    def specs(self) -> Tree:
        """The tree of ParamSpec."""

    def apply(
        self, params: Any, tokens_BS: jax.Array, segments_BS: jax.Array, positions_BS: jax.Array, compute: Compute
    ) -> Readout:
        """Pure. `params` has the structure of `specs()` with arrays for leaves."""

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward, causal attention counted once: the work that counts for MFU."""
