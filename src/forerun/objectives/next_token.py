"""Next-token prediction: the objective of pre-training and of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.objectives.base import LOSS, Plain, Sums, told_sums
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import cross_entropy
from forerun.objectives.router_losses import RouterLosses, router_values


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
