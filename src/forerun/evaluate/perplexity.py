"""Loss on held-out text, computed by the same next-token objective as in training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.nn.sharding import BATCH_AXES, batched
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import chunk_length
from forerun.objectives.next_token import NextToken


@dataclass(frozen=True)
class HeldOutText:
    """The loss on held-out text."""

    nats: float  # negative log-likelihood of all predicted tokens
    tokens: int  # predicted tokens
    text_bytes: int

    @property
    def loss(self) -> float:
        """The loss in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per byte of text, which is comparable between tokenizers."""
        return self.nats / math.log(2) / self.text_bytes


def held_out(
    model: Model,
    params: Any,
    mesh: Mesh,
    compute: Compute,
    batches: Iterable[Batch[NDArray[Any]]],
    *,
    text_bytes: int,
) -> HeldOutText:
    """Return the loss on batches of held-out text.

    Args:
        model: The model.
        params: Parameters with their stored sharding.
        mesh: The device mesh.
        compute: The settings of the computation.
        batches: Batches [B, S], all of one shape. The mesh must divide B evenly.
        text_bytes: The size of the text.

    Raises:
        UserError: The loss is not finite, or there is no token to predict.
    """
    parts = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)

    def sums(params: Any, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
        B, S = batch.tokens.shape
        total = NextToken(chunk_length(S, max(1, B // parts), model.vocab))(model, params, batch, compute)
        return total.loss, total.weight

    everywhere = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(sums, out_shardings=(everywhere, everywhere))
    nats, tokens = 0.0, 0.0
    for batch in batches:
        placed = jax.tree.map(lambda x: jax.device_put(x, batched(mesh, x.shape, "BS")), batch)
        with jax.set_mesh(mesh):
            found = program(params, placed)
        loss, weight = (float(np.asarray(x)) for x in found)
        nats, tokens = nats + loss, tokens + weight
    if not math.isfinite(nats):
        raise UserError(
            "E-EVAL-004",
            "the loss on held-out text is not finite",
            why="the weights hold NaN or infinity, or overflow the dtype",
            fix="try --dtype float32; if the error remains, the checkpoint itself is broken",
        )
    if not tokens:
        raise UserError(
            "E-EVAL-005", "no token to predict", why="every document has only one token", fix="give more text"
        )
    return HeldOutText(nats, round(tokens), text_bytes)
