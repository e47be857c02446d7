"""Losses and metrics of the routers of a model with experts. Letters: L layers, X experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from forerun.nn.routing import Routing

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
