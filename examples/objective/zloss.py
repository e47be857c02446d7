"""A custom objective: next-token cross-entropy with a z-loss.

Without a penalty, log Z = logsumexp(logits) can drift. The z-loss adds `weight * (log Z)^2` per token, which pulls Z
towards 1. No full logits are needed: the loss of a token is log Z minus its logit, and its logit is one dot product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.nn.layers import soft_cap
from forerun.objectives.base import Plain, Sums
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import token_nats


@dataclass(frozen=True)
class ZLoss(Plain):
    """Cross-entropy plus z-loss. forerun passes `chunk`; the other fields come from the job's `objective.options`."""

    chunk: int
    weight: float = 1e-4

    nats: ClassVar[str | None] = "nats"  # the sum below whose perplexity is reported

    # --8<-- [start:loss]
    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        out = model.apply(params, batch.tokens, batch.segments, batch.positions, compute)
        nats_BS = token_nats(out.hidden_BSE, out.matrix_VE, batch.targets, self.chunk, out.softcap)
        rows_BSE = out.matrix_VE[batch.targets]
        logit_BS = jnp.einsum("BSE,BSE->BS", out.hidden_BSE, rows_BSE, preferred_element_type=jnp.float32)
        log_z_BS = nats_BS + soft_cap(logit_BS, out.softcap)
        nats = jnp.sum(nats_BS * batch.weights)
        squares = jnp.sum(jnp.square(log_z_BS) * batch.weights)
        told = {"nats": nats, "log_z_squared": squares}  # reported per token in metrics.jsonl and at validation
        return Sums(nats + self.weight * squares, jnp.sum(batch.weights), told)

    # --8<-- [end:loss]
