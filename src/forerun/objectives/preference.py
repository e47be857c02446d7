"""Preference objectives on rows of pairs: DPO, IPO and cDPO.

The reference is the model at the start of the run. Each loss depends on the margin: how much the log-probability of the
chosen answer has grown since then, minus that of the rejected answer. B rows, S positions, P pairs of a row, 2 sides:
chosen, rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from forerun.models.base import Model
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree
from forerun.nn.weights.lowrank import bare
from forerun.objectives.base import Plain, Sums, WithCompanion, at_rest
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import token_nats
from forerun.objectives.pairs import PAIRS, REFERENCE, max_pairs

ACCURACY = "rewards/accuracies"  # share of pairs with a positive margin


@dataclass(frozen=True)
class Preference(Plain):
    """A preference objective. The weight of its sums is the number of pairs.

    Args:
      chunk: positions whose logits exist at one time.
      loss: the loss function.
      beta: scale of the rewards.
      smoothing: assumed probability that a pair is labelled the wrong way round (cDPO).
      reference: `cached` values come with the batch, `beside` runs a frozen copy of the initial model, and `base` runs
        the model without its adapters.
      dtype: dtype of the frozen copy.
    """

    chunk: int
    loss: Literal["dpo", "ipo", "cdpo"] = "dpo"
    beta: float = 0.1
    smoothing: float = 0.0
    reference: Literal["base", "cached", "beside"] = "cached"
    dtype: str = "float32"

    unit: ClassVar[str] = "pairs"

    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        pairs_BS = batch.extras[PAIRS]
        counts_BP2 = by_side(batch.weights, pairs_BS)
        logps_BP2 = self.said(model, self.own(params), batch, compute)
        reference_BP2 = self._reference(model, params, batch, compute)
        if self.loss == "ipo":  # IPO uses the mean log-probability per token
            logps_BP2, reference_BP2 = (x / jnp.maximum(counts_BP2, 1.0) for x in (logps_BP2, reference_BP2))
        rewards_BP2 = self.beta * (logps_BP2 - reference_BP2)
        margins_BP = rewards_BP2[..., 0] - rewards_BP2[..., 1]
        # Unused places of a row have no tokens on either side, and do not count.
        counted_BP = jnp.all(counts_BP2 > 0, axis=-1).astype(jnp.float32)

        def total(values_BP: jax.Array) -> jax.Array:
            return jnp.sum(values_BP * counted_BP)

        metrics = {
            "rewards/chosen": total(rewards_BP2[..., 0]),
            "rewards/rejected": total(rewards_BP2[..., 1]),
            "rewards/margins": total(margins_BP),
            ACCURACY: total((margins_BP > 0).astype(jnp.float32)),
            "logps/chosen": total(logps_BP2[..., 0]),
            "logps/rejected": total(logps_BP2[..., 1]),
        }
        return Sums(total(self.losses(margins_BP)), jnp.sum(counted_BP), metrics)

    def losses(self, margins: jax.Array) -> jax.Array:
        """Return the loss of each pair. `margins` are the differences of the rewards, chosen minus rejected."""
        if self.loss == "ipo":
            return jnp.square(margins / self.beta - 1 / (2 * self.beta))
        right, wrong = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
        return -(1 - self.smoothing) * right - self.smoothing * wrong

    def said(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> jax.Array:
        """Return the log-probabilities of both answers of every pair, [B, P, 2]."""
        out = model.apply(params, batch.tokens, batch.segments, batch.positions, compute)
        nats_BS = token_nats(out.hidden_BSE, out.matrix_VE, batch.targets, self.chunk, out.softcap)
        return by_side(-nats_BS * batch.weights, batch.extras[PAIRS])

    def _reference(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> jax.Array:
        if self.reference == "cached":
            return batch.extras[REFERENCE]
        at_start = params.companion if self.reference == "beside" else bare(params)
        return jax.lax.stop_gradient(self.said(model, jax.lax.stop_gradient(at_start), batch, compute))

    def specs(self, specs: Tree) -> Tree:
        return WithCompanion(specs, at_rest(specs, jnp.dtype(self.dtype))) if self.reference == "beside" else specs

    def start(self, params: Tree, given: Mapping[str, Tree]) -> Tree:
        if self.reference != "beside":
            return params
        return WithCompanion(params, jax.tree.map(lambda x: jnp.copy(x).astype(self.dtype), params))

    def own(self, params: Tree) -> Tree:
        return params.own if isinstance(params, WithCompanion) else params

    def extras(self, rows: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
        arrays = {PAIRS: jax.ShapeDtypeStruct((rows, sequence), jnp.int32)}
        if self.reference == "cached":
            arrays[REFERENCE] = jax.ShapeDtypeStruct((rows, max_pairs(sequence), 2), jnp.float32)
        return arrays

    def flops_per_token(self, model: Model, sequence: int) -> float:
        """Return the FLOPs per token. A reference in the same step adds a forward pass."""
        return model.flops_per_token(sequence) * (1 if self.reference == "cached" else 4 / 3)


def by_side(values_BS: jax.Array, pairs_BS: jax.Array) -> jax.Array:
    """Return the sums over the positions of each side of each pair, [B, P, 2].

    No array [B, S, P] is stored, because the compiler fuses the comparison with the sum.
    """
    numbers_P = jnp.arange(1, max_pairs(pairs_BS.shape[1]) + 1, dtype=pairs_BS.dtype)

    def side(sign: int) -> jax.Array:
        mine_BSP = pairs_BS[:, :, None] == sign * numbers_P
        return jnp.sum(jnp.where(mine_BSP, values_BS[:, :, None], jnp.zeros((), values_BS.dtype)), axis=1)

    return jnp.stack([side(1), side(-1)], axis=-1)
