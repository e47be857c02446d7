"""Next-token prediction: the objective of pre-training and of supervised fine-tuning.

A model with experts adds the losses of its routers. Letters: L layers, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.nn.routing import Routing
from forerun.objectives.base import LOSS, Plain, Sums, told_sums
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import cross_entropy

BALANCE, SQUARES = "experts/balance_loss", "experts/z_loss"
LOAD, ENTROPY = "experts/max_load", "experts/entropy"


@dataclass(frozen=True)
class RouterLosses:
    """Coefficients of the losses of the routers, which are added to the mean loss of the tokens."""

    balance: float = 0.0
    squares: float = 0.0

    @property
    def are_used(self) -> bool:
        """Whether a coefficient is not zero."""
        return bool(self.balance or self.squares)

    def penalty(self, values: dict[str, jax.Array]) -> jax.Array:
        """Return the sum of the losses, given the values that `router_values` returns."""
        return self.balance * values[BALANCE] + self.squares * values[SQUARES]


def router_values(routing: Routing[jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
    """Return the losses and the load balance of all routers.

    The balance loss is that of the Switch Transformer (https://arxiv.org/abs/2101.03961) as transformers computes it:
    the shares of tokens and the probabilities of each expert are averaged over all layers before they are multiplied.
    It is the number of experts per token if all experts have the same load. The z-loss is that of ST-MoE.

    Args:
        routing: Sums over the tokens of a micro-batch.
        tokens: The number of these tokens.
    """
    layers, experts = routing.counts_LX.shape
    total = jnp.maximum(tokens.astype(jnp.float32), 1.0)
    shares_X = jnp.sum(routing.counts_LX, axis=0) / (layers * total)
    probabilities_X = jnp.sum(routing.probabilities_LX, axis=0) / (layers * total)
    pairs_L = jnp.maximum(jnp.sum(routing.counts_LX, axis=1), 1.0)
    load_LX = jax.lax.stop_gradient(routing.counts_LX / pairs_L[:, None])
    entropy_L = -jnp.sum(jnp.where(load_LX > 0, load_LX * jnp.log(jnp.maximum(load_LX, 1e-30)), 0.0), axis=1)
    return {
        BALANCE: experts * jnp.sum(shares_X * probabilities_X),
        SQUARES: jnp.sum(routing.squares_L) / (layers * total),
        LOAD: jnp.max(load_LX) * experts,
        ENTROPY: jnp.mean(entropy_L) / jnp.log(float(max(experts, 2))),
    }


@dataclass(frozen=True)
class NextToken(Plain):
    """Cross entropy of the next token, summed over all targets with loss."""

    chunk: int  # positions whose logits exist at one time
    routers: RouterLosses = RouterLosses()  # of a model with experts

    nats: ClassVar[str | None] = LOSS

    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        out = model.apply(params, batch.tokens, batch.segments, batch.positions, compute)
        loss = cross_entropy(out.hidden_BSE, out.matrix_VE, batch.targets, batch.weights, self.chunk, out.softcap)
        weight, told = jnp.sum(batch.weights), told_sums(out, batch.weights)
        if out.routing is None:
            return Sums(loss, weight, told)
        values = router_values(out.routing, jnp.sum(batch.segments > 0))
        told |= {name: weight * jax.lax.stop_gradient(value) for name, value in values.items()}
        penalty = weight * self.routers.penalty(values) if self.routers.are_used else None
        return Sums(loss, weight, told, penalty)
