"""Learn from a teacher: the text and the teacher's distribution together, and if wanted a pull towards the beginning.

The teacher runs in the step, its weights at rest beside the student's; or it was written down before (`record.py`)
and comes with the batch. B batch, S sequence, E embed, V vocab, N sampled positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from forerun.models.base import Model, Readout
from forerun.nn import lowrank
from forerun.nn.attention import Kernel
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree
from forerun.nn.weights import is_weight
from forerun.objectives.base import Sums
from forerun.objectives.batch import Batch
from forerun.objectives.chunked import LOSS, Arrays, chunked
from forerun.objectives.companion import Accompanied, at_rest
from forerun.objectives.soft import HARD, HIDDEN, IDS, MATRIX, SOFT, TAIL, TARGETS, VALUES, Beside, WrittenDown

TEACHER, BEGINNING = "teacher", "beginning"
ANCHOR = "anchor"
REST = jnp.bfloat16
SMALL_VOCAB = 1 << 16


@dataclass(frozen=True)
class Distil:
    """`teacher` is None if it was written down, by `top_k` tokens of a vocabulary of `vocab`."""

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
        own, companion = self.own(params), params.companion if isinstance(params, Accompanied) else {}
        out = model.apply(own, batch.tokens, batch.segments, batch.positions, compute)
        sums = self._taught(out, companion, batch, compute)
        loss, told = sums.pop(LOSS), {name: sums[name] for name in (HARD, SOFT)}
        if self.anchor:
            before = companion[BEGINNING] if BEGINNING in companion else lowrank.bare(own)
            began = model.apply(_constant(before), batch.tokens, batch.segments, batch.positions, compute)
            told[ANCHOR] = self._pulled(out, began, batch)
            loss = loss + self.anchor * told[ANCHOR]
        return Sums(loss, jnp.sum(batch.weights), jax.lax.stop_gradient(told))

    def specs(self, specs: Tree) -> Tree:
        companion = self.reads()
        if self.anchor and not _has_adapters(specs):
            companion[BEGINNING] = at_rest(specs, REST)
        return Accompanied(specs, companion) if companion else specs

    def reads(self) -> dict[str, Tree]:
        return {TEACHER: at_rest(self.teacher.specs(), REST)} if self.teacher else {}

    def start(self, params: Tree, given: Mapping[str, Tree]) -> Tree:
        companion = {name: given[name] for name in self.reads()}
        if self.anchor and not _has_adapters(params):
            companion[BEGINNING] = jax.tree.map(lambda x: x.astype(REST), params)
        return Accompanied(params, companion) if companion else params

    def own(self, params: Tree) -> Tree:
        return params.own if isinstance(params, Accompanied) else params

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
        """A model at rest goes forward only: a third."""
        own = model.flops_per_token(sequence)
        teacher = self.teacher.flops_per_token(sequence) / 3 if self.teacher else 0.0
        return own + teacher + (own / 3 if self.anchor else 0.0)

    def _taught(self, out: Readout, companion: Any, batch: Batch[jax.Array], compute: Compute) -> Arrays:
        sides = {TARGETS: batch.targets}
        if self.teacher is None:
            sides |= {name: batch.extras[name] for name in (VALUES, IDS, TAIL)}
            rule = WrittenDown(self.soft, self.temperature)
            return chunked(rule, out.hidden_BSE, out.matrix_VE, batch.weights, sides, {}, self.chunk, out.softcap)
        said = self.teacher.apply(
            _constant(companion[TEACHER]), batch.tokens, batch.segments, batch.positions, _fit(compute, self.teacher)
        )
        return _beside(out, said, batch.weights, sides, self.chunk, self.soft, self.temperature)

    def _pulled(self, out: Readout, began: Readout, batch: Batch[jax.Array]) -> jax.Array:
        """An estimate of the sum of KL(beginning || now) over all counted tokens, from a sample of positions."""
        S = batch.tokens.shape[1]
        at_BN = sampled(batch.tokens, self.anchor_share, self.seed)
        weights_BN = jnp.take_along_axis(batch.weights, at_BN, axis=1) * (S / at_BN.shape[1])
        now, then = (
            replace(one, hidden_BSE=jnp.take_along_axis(one.hidden_BSE, at_BN[..., None], axis=1))
            for one in (out, began)
        )
        return _beside(now, then, weights_BN, {}, self.chunk, 1.0, 1.0)[LOSS]


def sampled(tokens_BS: jax.Array, share: float, seed: int) -> jax.Array:
    """Positions [B, N], ascending: one drawn from each N-th of a row. They follow from the row and the seed, so they
    are the same in every batch, on every mesh, that the row may come in."""
    S = tokens_BS.shape[1]
    N = max(1, round(share * S))
    odd_S = 2 * jax.lax.iota(jnp.uint32, S) + 1
    mixed_B = jnp.sum(tokens_BS.astype(jnp.uint32) * odd_S, axis=1, dtype=jnp.uint32)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), mixed_B)
    jitter_BN = jax.vmap(lambda key: jax.random.uniform(key, (N,)))(keys_B)
    at_BN = jnp.floor((jax.lax.iota(jnp.float32, N) + jitter_BN) * (S / N)).astype(jnp.int32)
    return jnp.minimum(at_BN, S - 1)


def ids_dtype(vocab: int) -> Any:
    """Of token ids on their way to the device."""
    return np.dtype(np.uint16) if vocab <= SMALL_VOCAB else np.dtype(np.int32)


def _beside(
    out: Readout, said: Readout, weights: jax.Array, sides: Arrays, chunk: int, soft: float, temperature: float
) -> Arrays:
    """The sums against another model's read-out, its vocabulary cut or filled up to the student's."""
    vocab, (theirs, width) = out.matrix_VE.shape[0], said.matrix_VE.shape
    matrix = said.matrix_VE[:vocab]
    if theirs < vocab:
        matrix = jnp.concatenate([matrix, jnp.zeros((vocab - theirs, width), matrix.dtype)])
    rule = Beside(soft, temperature, theirs, said.softcap)
    sides = {**sides, HIDDEN: said.hidden_BSE}
    return chunked(rule, out.hidden_BSE, out.matrix_VE, weights, sides, {MATRIX: matrix}, chunk, out.softcap)


def _constant(params: Tree) -> Tree:
    return jax.tree.map(jax.lax.stop_gradient, params)


def _fit(compute: Compute, model: Model) -> Compute:
    """cuDNN's attention has no cap on scores: a teacher that has one is computed by XLA's."""
    capped = getattr(getattr(model, "config", None), "attention_softcap", None) is not None
    return replace(compute, attention=Kernel("xla")) if capped and compute.attention.name == "cudnn" else compute


def _has_adapters(tree: Tree) -> bool:
    return any(isinstance(leaf, lowrank.LowRank) for leaf in jax.tree.leaves(tree, is_leaf=is_weight))
