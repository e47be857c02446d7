"""Soft losses: rules for `chunked` that compare a student's logits with a teacher's distribution.

The teacher's distribution is either complete, or consists of its K most probable tokens and the mass of all others.

The soft loss is T^2 KL(teacher_T || student_T), where both are softmaxes of logits / T (Hinton, Vinyals and Dean 2015).
Its derivative by the student's logits is T (q - p). If only K tokens and a tail are known, all other tokens form one
bucket. The loss compares the student's mass in this bucket with the teacher's, and not how it is distributed inside.
With K = V the tail is empty, and both rules agree. B batch, C chunk, V vocab, E embed, K kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from forerun.nn.layers import soft_cap
from forerun.objectives.chunked import LOSS, Arrays
from forerun.objectives.cross_entropy import Split, logits_of, nats_and_slope

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
