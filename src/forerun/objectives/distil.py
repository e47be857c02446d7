"""Distillation: a loss on the text and on a teacher's distribution, and optionally an anchor to the initial model.

Either the teacher runs in the step, with frozen weights beside the student's. Or its logits were cached before
(`record.py`) and come with the batch. B batch, S sequence, E embed, V vocab, N sampled positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from forerun.models.base import Model, Readout, capabilities_of
from forerun.nn.attention import Kernel
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree
from forerun.nn.weights import lowrank
from forerun.nn.weights.dense import is_weight
from forerun.objectives.base import Sums, told_sums
from forerun.objectives.batch import Batch
from forerun.objectives.chunked import LOSS, Arrays, chunked
from forerun.objectives.companion import WithCompanion, at_rest
from forerun.objectives.soft import (
    HARD,
    HIDDEN,
    IDS,
    MATRIX,
    SOFT,
    TAIL,
    TARGETS,
    VALUES,
    CachedTeacherLoss,
    LiveTeacherLoss,
)

TEACHER, BEGINNING = "teacher", "beginning"  # names of companions
ANCHOR = "anchor"  # name of a metric
REST = jnp.bfloat16  # dtype of companions
SMALL_VOCAB = 1 << 16  # ids of at most this many tokens fit in 16 bits


@dataclass(frozen=True)
class Distil:
    """The objective of distillation.

    Args:
      chunk: positions whose logits exist at one time.
      soft: weight of the soft loss, from 0 to 1; the cross entropy has the weight 1 - soft.
      temperature: temperature of the soft loss.
      teacher: the model that runs in the step; None: cached logits come with the batch.
      top_k: number of cached logits per position.
      vocab: number of token ids of the cached logits.
      anchor: weight of KL(initial model || student).
      anchor_share: share of positions at which the anchor is computed.
      seed: selects these positions.
    """

    chunk: int
    soft: float
    temperature: float
    teacher: Model | None = None
    top_k: int = 0
    vocab: int = 0
    anchor: float = 0.0
    anchor_share: float = 1.0
    seed: int = field(default=0)

    unit: ClassVar[str] = "tokens"
    nats: ClassVar[str | None] = HARD

    def __call__(self, model: Model, params: Any, batch: Batch[jax.Array], compute: Compute) -> Sums:
        own, companion = self.own(params), params.companion if isinstance(params, WithCompanion) else {}
        out = model.apply(own, batch.tokens, batch.segments, batch.positions, compute)
        sums = self._distillation_sums(out, companion, batch, compute)
        loss = sums.pop(LOSS)
        metrics = told_sums(out, batch.weights) | {name: sums[name] for name in (HARD, SOFT)}
        if self.anchor:
            # With adapters, the initial model is the model without them, so that no copy is stored.
            initial_params = companion[BEGINNING] if BEGINNING in companion else lowrank.bare(own)
            initial = model.apply(
                _stop_gradient(initial_params), batch.tokens, batch.segments, batch.positions, compute
            )
            metrics[ANCHOR] = self._anchor_sum(out, initial, batch)
            loss = loss + self.anchor * metrics[ANCHOR]
        return Sums(loss, jnp.sum(batch.weights), jax.lax.stop_gradient(metrics))

    def specs(self, specs: Tree) -> Tree:
        companion = self.reads()
        if self.anchor and not _has_adapters(specs):
            companion[BEGINNING] = at_rest(specs, REST)
        return WithCompanion(specs, companion) if companion else specs

    def reads(self) -> dict[str, Tree]:
        return {TEACHER: at_rest(self.teacher.specs(), REST)} if self.teacher else {}

    def start(self, params: Tree, given: Mapping[str, Tree]) -> Tree:
        companion = {name: given[name] for name in self.reads()}
        if self.anchor and not _has_adapters(params):
            companion[BEGINNING] = jax.tree.map(lambda x: x.astype(REST), params)
        return WithCompanion(params, companion) if companion else params

    def own(self, params: Tree) -> Tree:
        return params.own if isinstance(params, WithCompanion) else params

    def extras(self, rows: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
        if self.teacher:
            return {}
        kept = (rows, sequence, self.top_k)
        return {
            VALUES: jax.ShapeDtypeStruct(kept, jnp.float16),
            IDS: jax.ShapeDtypeStruct(kept, ids_dtype(self.vocab)),
            TAIL: jax.ShapeDtypeStruct(kept[:2], jnp.float32),
        }

    def flops_per_token(self, model: Model, sequence: int) -> float:
        """Return the FLOPs per token. A frozen model only runs forward, which is a third of a training step."""
        own = model.flops_per_token(sequence)
        teacher = self.teacher.flops_per_token(sequence) / 3 if self.teacher else 0.0
        return own + teacher + (own / 3 if self.anchor else 0.0)

    def _distillation_sums(self, out: Readout, companion: Any, batch: Batch[jax.Array], compute: Compute) -> Arrays:
        """Return the sums of the mixed, the hard and the soft loss."""
        sides = {TARGETS: batch.targets}
        if self.teacher is None:
            sides |= {name: batch.extras[name] for name in (VALUES, IDS, TAIL)}
            rule = CachedTeacherLoss(self.soft, self.temperature)
            return chunked(rule, out.hidden_BSE, out.matrix_VE, batch.weights, sides, {}, self.chunk, out.softcap)
        teacher = self.teacher.apply(
            _stop_gradient(companion[TEACHER]),
            batch.tokens,
            batch.segments,
            batch.positions,
            _fit(compute, self.teacher),
        )
        return _sums_against(out, teacher, batch.weights, sides, self.chunk, self.soft, self.temperature)

    def _anchor_sum(self, out: Readout, initial: Readout, batch: Batch[jax.Array]) -> jax.Array:
        """Return an estimate of the sum of KL(initial model || student) over all targets with loss.

        It is computed at a sample of positions, and scaled up to all of them.
        """
        S = batch.tokens.shape[1]
        at_BN = sampled(batch.tokens, self.anchor_share, self.seed)
        weights_BN = jnp.take_along_axis(batch.weights, at_BN, axis=1) * (S / at_BN.shape[1])
        now, then = (
            replace(one, hidden_BSE=jnp.take_along_axis(one.hidden_BSE, at_BN[..., None], axis=1))
            for one in (out, initial)
        )
        return _sums_against(now, then, weights_BN, {}, self.chunk, 1.0, 1.0)[LOSS]


def sampled(tokens_BS: jax.Array, share: float, seed: int) -> jax.Array:
    """Return sampled positions [B, N], ascending: one from each of N equal intervals of a row.

    They depend only on the tokens of the row and the seed, so they are the same in every batch and on every mesh.
    """
    S = tokens_BS.shape[1]
    N = max(1, round(share * S))
    odd_S = 2 * jax.lax.iota(jnp.uint32, S) + 1
    mixed_B = jnp.sum(tokens_BS.astype(jnp.uint32) * odd_S, axis=1, dtype=jnp.uint32)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), mixed_B)
    jitter_BN = jax.vmap(lambda key: jax.random.uniform(key, (N,)))(keys_B)
    at_BN = jnp.floor((jax.lax.iota(jnp.float32, N) + jitter_BN) * (S / N)).astype(jnp.int32)
    return jnp.minimum(at_BN, S - 1)


def ids_dtype(vocab: int) -> Any:
    """Return the dtype of token ids in a batch: the smaller one that holds them, to transfer fewer bytes."""
    return np.dtype(np.uint16) if vocab <= SMALL_VOCAB else np.dtype(np.int32)


def _sums_against(
    out: Readout, other: Readout, weights: jax.Array, sides: Arrays, chunk: int, soft: float, temperature: float
) -> Arrays:
    """Return the sums against another model, whose vocabulary is cut or padded to the student's."""
    vocab, (theirs, width) = out.matrix_VE.shape[0], other.matrix_VE.shape
    matrix = other.matrix_VE[:vocab]
    if theirs < vocab:
        matrix = jnp.concatenate([matrix, jnp.zeros((vocab - theirs, width), matrix.dtype)])
    rule = LiveTeacherLoss(soft, temperature, theirs, other.softcap)
    sides = {**sides, HIDDEN: other.hidden_BSE}
    return chunked(rule, out.hidden_BSE, out.matrix_VE, weights, sides, {MATRIX: matrix}, chunk, out.softcap)


def _stop_gradient(params: Tree) -> Tree:
    return jax.tree.map(jax.lax.stop_gradient, params)


def _fit(compute: Compute, model: Model) -> Compute:
    """Return settings that `model` supports. cuDNN has no attention softcap, so a model with one uses XLA attention."""
    capped = capabilities_of(model).attention_softcap is not None
    return replace(compute, attention=Kernel("xla")) if capped and compute.attention.name == "cudnn" else compute


def _has_adapters(tree: Tree) -> bool:
    return any(isinstance(leaf, lowrank.LowRank) for leaf in jax.tree.leaves(tree, is_leaf=is_weight))
