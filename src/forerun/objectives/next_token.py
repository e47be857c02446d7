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


@dataclass(frozen=True)
class NextToken(Plain):
    """Cross entropy of the next token, summed over all targets with loss."""

    chunk: int  # positions whose logits exist at one time

    nats: ClassVar[str | None] = LOSS

    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        out = model.apply(params, batch.tokens, batch.segments, batch.positions, compute)
        loss = cross_entropy(out.hidden_BSE, out.matrix_VE, batch.targets, batch.weights, self.chunk, out.softcap)
        return Sums(loss, jnp.sum(batch.weights), told_sums(out, batch.weights))
