"""Distillation: a loss on the text and on a teacher's distribution, and optionally an anchor to the initial model.

Either the teacher runs in the step, with frozen weights beside the student's. Or its logits were cached before
(`program/recording.py`) and come with the batch: its K most probable tokens, and the mass of all others.

The soft loss is T^2 KL(teacher_T || student_T), where both are softmaxes of logits / T (Hinton, Vinyals and Dean 2015).
Its derivative by the student's logits is T (q - p). If only K tokens and a tail are known, all other tokens form one
bucket. The loss compares the student's mass in this bucket with the teacher's, and not how it is distributed inside.
With K = V the tail is empty, and both rules agree.

B batch, S sequence, E embed, V vocab, C chunk, K kept, N sampled positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from forerun.models.base import Model, Readout, capabilities_of
from forerun.nn.attention import Kernel
from forerun.nn.compute import Compute
from forerun.nn.layers import soft_cap
from forerun.nn.sharding import batch_axes, by_hand
from forerun.nn.spec import Tree
from forerun.nn.weights import lowrank
from forerun.nn.weights.dense import is_weight
from forerun.objectives.base import Sums, WithCompanion, at_rest, told_sums
from forerun.objectives.batch import Batch
from forerun.objectives.cross_entropy import Split, in_chunks, logits_of, nats_and_slope, summed, unchunked

# ---- Chunked losses for any rule ----
# As in `cross_entropy.py`, the logits of all positions never exist at the same time. A rule receives the logits of a
# chunk and other arrays of the same positions (sides). It returns named values for each position, and the derivative of
# one of them, "loss", by the logits.

Arrays = dict[str, jax.Array]
LOSS = "loss"


class Rule(Protocol):
    """A loss function on a chunk of logits. It must be immutable and hashable, as a static argument."""

    def __call__(self, logits_BCV: jax.Array, sides: Arrays, tables: Arrays, split: Split) -> tuple[Arrays, jax.Array]:
        """Return named values [B, C] including "loss", and the derivative of "loss" by the logits [B, C, V].

        Args:
          logits_BCV: logits after the softcap. V may be this device's part of the vocabulary.
          sides: arrays of the same positions [B, C, ...].
          tables: arrays [V, ...], split over the vocabulary in the same way as the logits.
          split: the mesh axes; its softcap is None.
        """


@partial(jax.custom_vjp, nondiff_argnums=(0, 6, 7))
def chunked(
    rule: Rule,
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    chunk: int,
    softcap: float | None = None,
) -> Arrays:
    """Return the sums over positions of weight x the rule's values, in float32.

    Only "loss" is differentiable, and only by the hidden states and the matrix.

    Args:
      rule: returns the values and the derivative for a chunk.
      hidden_BSE: hidden states of the model.
      matrix_VE: read-out matrix of the model.
      weights_BS: weight of each position.
      sides: further arrays of the positions, [B, S, ...].
      tables: further arrays of the vocabulary, [V, ...].
      chunk: positions whose logits exist at one time.
      softcap: cap of the model's logits, if it has one.
    """
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_sums_local, rule=rule, chunk=chunk, split=split)
    sums: Arrays = by_hand(local, arguments=_arguments(split, sides, tables), results=P())(
        hidden_BSE, matrix_VE, weights_BS, sides, tables
    )
    return sums


def _chunked_forward(
    rule: Rule,
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    chunk: int,
    softcap: float | None,
) -> tuple[Arrays, tuple[jax.Array, jax.Array]]:
    # Gradients are computed in the forward pass, so that the logits are computed only once.
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_sums_and_gradients_local, rule=rule, chunk=chunk, split=split)
    results = (P(), split.hidden_gradient, P(split.vocab, split.embed))
    sums, hidden_gradient, matrix_gradient = by_hand(
        local, arguments=_arguments(split, sides, tables), results=results
    )(hidden_BSE, matrix_VE, weights_BS, sides, tables)
    return sums, (hidden_gradient, matrix_gradient)


def _chunked_backward(
    rule: Rule, chunk: int, softcap: float | None, gradients: tuple[jax.Array, jax.Array], cotangents: Arrays
) -> tuple[Any, ...]:
    hidden, matrix = gradients
    cotangent = cotangents[LOSS]
    return hidden * cotangent.astype(hidden.dtype), matrix * cotangent.astype(matrix.dtype), None, None, None


chunked.defvjp(_chunked_forward, _chunked_backward)


def _arguments(split: Split, sides: Arrays, tables: Arrays) -> tuple[Any, ...]:
    hidden, matrix, weights, _ = split.arguments
    beside = {name: P(batch_axes(), split.context, *(None,) * (array.ndim - 2)) for name, array in sides.items()}
    return hidden, matrix, weights, beside, dict.fromkeys(tables, P(split.vocab, None))


@jax.named_scope("loss")
def _sums_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    *,
    rule: Rule,
    chunk: int,
    split: Split,
) -> Arrays:
    def figures(piece: Any) -> Arrays:
        hidden_BCE, weights_BC, beside = piece
        found, _, _ = _values_and_slope(rule, hidden_BCE, matrix_VE, beside, tables, split)
        return {name: jnp.sum(each_BC * weights_BC) for name, each_BC in found.items()}

    pieces = jax.tree.map(lambda x: in_chunks(x, chunk), (hidden_BSE, weights_BS, sides))
    start = _zeros(figures, pieces)
    total, _ = lax.scan(lambda sums, piece: (jax.tree.map(jnp.add, sums, figures(piece)), None), start, pieces)
    return lax.psum(total, split.rows)


@jax.named_scope("loss")
def _sums_and_gradients_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    *,
    rule: Rule,
    chunk: int,
    split: Split,
) -> tuple[Arrays, jax.Array, jax.Array]:
    def parts(piece: Any) -> tuple[Arrays, jax.Array, jax.Array]:
        hidden_BCE, weights_BC, beside = piece
        found, slope_BCV, bend_BCV = _values_and_slope(rule, hidden_BCE, matrix_VE, beside, tables, split)
        slope_BCV = (slope_BCV * bend_BCV * weights_BC[..., None]).astype(hidden_BCE.dtype)
        more = jnp.einsum("BCV,BCE->VE", slope_BCV, hidden_BCE, preferred_element_type=jnp.float32)
        sums = {name: jnp.sum(each_BC * weights_BC) for name, each_BC in found.items()}
        return sums, more, jnp.einsum("BCV,VE->BCE", slope_BCV, matrix_VE)

    def one(carry: tuple[Arrays, jax.Array], piece: Any) -> tuple[tuple[Arrays, jax.Array], jax.Array]:
        sums, more, hidden_gradient = parts(piece)
        return jax.tree.map(jnp.add, carry, (sums, more)), hidden_gradient

    pieces = jax.tree.map(lambda x: in_chunks(x, chunk), (hidden_BSE, weights_BS, sides))
    start = _zeros(lambda piece: parts(piece)[:2], pieces)
    (sums, matrix_gradient), hidden_pieces = lax.scan(one, start, pieces)
    hidden_gradient = unchunked(hidden_pieces, hidden_BSE.shape)
    if split.vocab:
        hidden_gradient = summed(
            hidden_gradient, (split.vocab,), scatter=(split.sequence,) if split.sequence else None, dim=1
        )
    matrix_gradient = summed(matrix_gradient.astype(matrix_VE.dtype), split.rows, scatter=split.embed, dim=1)
    return lax.psum(sums, split.rows), hidden_gradient, matrix_gradient


def _values_and_slope(
    rule: Rule, hidden_BCE: jax.Array, matrix_VE: jax.Array, beside: Arrays, tables: Arrays, split: Split
) -> tuple[Arrays, jax.Array, jax.Array]:
    """Return the rule's values and derivative, and the derivative of the capped logits by the uncapped ones."""
    logits_BCV = soft_cap(logits_of(hidden_BCE, matrix_VE), split.softcap)
    found, slope_BCV = rule(logits_BCV, beside, tables, replace(split, softcap=None))
    bend = jnp.ones((), jnp.float32) if split.softcap is None else 1 - jnp.square(logits_BCV / split.softcap)
    return found, slope_BCV, bend


def _zeros(function: Any, pieces: Any) -> Any:
    """Return zeros in the structure of what `function` returns for one chunk, as the start of a sum."""
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], pieces))
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)


# ---- Rules that compare a student's logits with a teacher's distribution ----

HARD, SOFT = "hard", "soft"
TARGETS = "targets"
HIDDEN, MATRIX = "teacher_hidden", "teacher_matrix"  # of a teacher that runs in the same step
VALUES, IDS, TAIL = "teacher_values", "teacher_ids", "teacher_tail"  # of cached teacher logits
NEVER = -1e30  # logit of tokens that the teacher does not have
TINY = 1e-30  # avoids log(0) and divisions by 0


@dataclass(frozen=True)
class Mix:
    """The weighted sum of both losses: (1 - soft) x cross entropy + soft x T^2 x KL."""

    soft: float
    temperature: float

    def mixed(
        self, logits_BCV: jax.Array, kl_BC: jax.Array, slope_BCV: jax.Array, sides: Arrays, split: Split
    ) -> tuple[Arrays, jax.Array]:
        """Return the losses of each position, and the derivative of their weighted sum by the logits.

        `slope_BCV` is the derivative of the KL by logits / T. Without targets in `sides`, only the soft loss is used.
        """
        soft_BC, slope_BCV = self.temperature**2 * kl_BC, self.temperature * slope_BCV
        if TARGETS not in sides:
            return {LOSS: self.soft * soft_BC}, self.soft * slope_BCV
        hard_BC, hard_slope_BCV = nats_and_slope(logits_BCV, sides[TARGETS], split)
        loss_BC = (1 - self.soft) * hard_BC + self.soft * soft_BC
        slope_BCV = (1 - self.soft) * hard_slope_BCV + self.soft * slope_BCV
        return {LOSS: loss_BC, HARD: hard_BC, SOFT: soft_BC}, slope_BCV


@dataclass(frozen=True)
class LiveTeacherLoss(Mix):
    """The loss against a teacher that runs in the same step.

    Its hidden states are among the sides, its read-out matrix is among the tables.
    """

    vocab: int  # the teacher's; it gives no probability to further tokens of the student
    softcap: float | None = None

    def __call__(self, logits_BCV: jax.Array, sides: Arrays, tables: Arrays, split: Split) -> tuple[Arrays, jax.Array]:
        teacher_BCV = soft_cap(logits_of(sides[HIDDEN], tables[MATRIX]), self.softcap)
        teacher_BCV = jnp.where(_token_ids(teacher_BCV, split) < self.vocab, teacher_BCV, NEVER)
        x_BCV, y_BCV = logits_BCV / self.temperature, teacher_BCV / self.temperature
        q_BCV, log_sum_q_BC = _softmax(x_BCV, split)
        p_BCV, log_sum_p_BC = _softmax(y_BCV, split)
        kl_BC = _sum_over_vocab(jnp.sum(p_BCV * (y_BCV - x_BCV), axis=-1), split) - log_sum_p_BC + log_sum_q_BC
        return self.mixed(logits_BCV, kl_BC, q_BCV - p_BCV, sides, split)


@dataclass(frozen=True)
class CachedTeacherLoss(Mix):
    """The loss against cached teacher logits.

    These are the K most probable tokens, with logits relative to the highest one, and the mass of all other tokens at
    this temperature.
    """

    def __call__(self, logits_BCV: jax.Array, sides: Arrays, tables: Arrays, split: Split) -> tuple[Arrays, jax.Array]:
        tail_BC, ids_BCK = sides[TAIL], sides[IDS].astype(jnp.int32)
        log_p_BCK = jax.nn.log_softmax(sides[VALUES].astype(jnp.float32) / self.temperature)
        # The probabilities of the K tokens sum to 1 - tail.
        log_p_BCK = log_p_BCK + jnp.log1p(-tail_BC)[..., None]
        q_BCV, log_sum_BC = _softmax(logits_BCV / self.temperature, split)
        # The student's logits of the K tokens. If the vocabulary is split, each device adds those that it holds.
        own = logits_BCV.shape[-1]
        here_BCK = ids_BCK - _first_id(own, split)
        is_here_BCK = (here_BCK >= 0) & (here_BCK < own)
        x_BCK = jnp.take_along_axis(logits_BCV, jnp.clip(here_BCK, 0, own - 1), axis=-1) / self.temperature
        x_BCK = _sum_over_vocab(jnp.where(is_here_BCK, x_BCK, jnp.float32(0)), split)
        p_BCK = jnp.exp(log_p_BCK)
        # The teacher's probabilities, spread over the vocabulary; -1 marks tokens of the tail.
        wanted_BCV = _scatter(jnp.full_like(q_BCV, -1), jnp.where(is_here_BCK, here_BCK, own), p_BCK)
        is_kept_BCV = wanted_BCV >= 0
        rest_BC = _sum_over_vocab(jnp.sum(jnp.where(is_kept_BCV, jnp.float32(0), q_BCV), axis=-1), split)
        kl_BC = jnp.sum(p_BCK * (log_p_BCK - x_BCK + log_sum_BC[..., None]), axis=-1)
        kl_BC = kl_BC + tail_BC * (jnp.log(jnp.maximum(tail_BC, TINY)) - jnp.log(jnp.maximum(rest_BC, TINY)))
        # Inside the tail, the target is the student's own distribution, scaled to the teacher's mass.
        share_BC = tail_BC / jnp.maximum(rest_BC, TINY)
        slope_BCV = q_BCV - jnp.where(is_kept_BCV, wanted_BCV, q_BCV * share_BC[..., None])
        return self.mixed(logits_BCV, kl_BC, slope_BCV, sides, split)


def _softmax(x_BCV: jax.Array, split: Split) -> tuple[jax.Array, jax.Array]:
    """Return the probabilities and the log-sum-exp, over the complete vocabulary of all devices."""
    highest_BC = jnp.max(x_BCV, axis=-1)
    if split.vocab:
        highest_BC = lax.pmax(highest_BC, split.vocab)
    powers_BCV = jnp.exp(x_BCV - highest_BC[..., None])
    total_BC = _sum_over_vocab(jnp.sum(powers_BCV, axis=-1), split)
    return powers_BCV / total_BC[..., None], jnp.log(total_BC) + highest_BC


def _sum_over_vocab(part: jax.Array, split: Split) -> jax.Array:
    """Return the sum over the devices that each hold a part of the vocabulary."""
    return lax.psum(part, split.vocab) if split.vocab else part


def _first_id(own: int, split: Split) -> jax.Array:
    """Return the first token id of this device's part of the vocabulary."""
    return own * lax.axis_index(split.vocab) if split.vocab else jnp.zeros((), jnp.int32)


def _token_ids(x_BCV: jax.Array, split: Split) -> jax.Array:
    """Return the token id of each element along the last axis, in the shape of `x`."""
    own = x_BCV.shape[-1]
    return _first_id(own, split) + lax.broadcasted_iota(jnp.int32, x_BCV.shape, x_BCV.ndim - 1)


def _scatter(x_BCV: jax.Array, at_BCK: jax.Array, values_BCK: jax.Array) -> jax.Array:
    """Return `x` with the values at the indices `at`. An index beyond the end is ignored."""
    row = jax.vmap(lambda x_V, at_K, values_K: x_V.at[at_K].set(values_K, mode="drop"))
    return jax.vmap(row)(x_BCV, at_BCK, values_BCK)


# ---- The objective ----

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
