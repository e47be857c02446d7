"""An objective that prints values from inside the compiled step, and can produce a NaN on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.objectives.base import LOSS, Plain, Sums
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import cross_entropy


@dataclass(frozen=True)
class Watched(Plain):
    """Cross-entropy of the next token. `faulty: true` takes the logarithm of a negative number."""

    chunk: int
    faulty: bool = False

    nats: ClassVar[str | None] = LOSS

    # --8<-- [start:print]
    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        out = model.apply(params, batch.tokens, batch.segments, batch.positions, compute)
        hidden_BSE = out.hidden_BSE
        jax.debug.print(
            "hidden: mean {mean:.4f}, largest {largest:.4f}, finite {finite}",
            mean=jnp.mean(hidden_BSE.astype(jnp.float32)),
            largest=jnp.max(jnp.abs(hidden_BSE)).astype(jnp.float32),
            finite=jnp.all(jnp.isfinite(hidden_BSE)),
        )
        loss = cross_entropy(hidden_BSE, out.matrix_VE, batch.targets, batch.weights, self.chunk, out.softcap)
        # --8<-- [end:print]
        if self.faulty:
            loss = loss * jnp.log(-jnp.sum(batch.weights))
        return Sums(loss, jnp.sum(batch.weights))
