"""What a student's logits are held against: a teacher's distribution, whole or as its likeliest tokens and the mass of
the rest.

The soft loss is T^2 KL(teacher_T || student_T), softmaxes of logits / T (Hinton, Vinyals and Dean 2015); its slope by
the student's logits is T (q - p). Of a teacher known by K tokens and a tail, all other tokens are one bucket: the
student's mass there is held to the teacher's, and how it divides it up is its own affair. With K = V nothing is left
in the tail, and both rules are one. B batch, C chunk, V vocab, E embed, K kept.
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
HIDDEN, MATRIX = "teacher_hidden", "teacher_matrix"  # of a teacher that runs beside the student
VALUES, IDS, TAIL = "teacher_values", "teacher_ids", "teacher_tail"  # of one that was written down
NEVER = -1e30  # a logit of what a teacher cannot say
TINY = 1e-30


@dataclass(frozen=True)
class Mix:
    """(1 - soft) x cross entropy + soft x T^2 x KL."""

    soft: float
    temperature: float

    def mixed(
        self, logits_BCV: jax.Array, kl_BC: jax.Array, slope_BCV: jax.Array, sides: Arrays, split: Split
    ) -> tuple[Arrays, jax.Array]:
        """`slope_BCV` is that of the KL by logits / T."""
        soft_BC, slope_BCV = self.temperature**2 * kl_BC, self.temperature * slope_BCV
        if TARGETS not in sides:
            return {LOSS: self.soft * soft_BC}, self.soft * slope_BCV
        hard_BC, hard_slope_BCV = nats_and_slope(logits_BCV, sides[TARGETS], split)
        loss_BC = (1 - self.soft) * hard_BC + self.soft * soft_BC
        slope_BCV = (1 - self.soft) * hard_slope_BCV + self.soft * slope_BCV
        return {LOSS: loss_BC, HARD: hard_BC, SOFT: soft_BC}, slope_BCV


@dataclass(frozen=True)
class Beside(Mix):
    """Against a model that is there: its hidden states are among the sides, its read-out among the tables."""

    vocab: int  # the teacher's; what the student has beyond, it never says
    softcap: float | None = None

    def __call__(self, logits_BCV: jax.Array, sides: Arrays, tables: Arrays, split: Split) -> tuple[Arrays, jax.Array]:
        teacher_BCV = soft_cap(logits_of(sides[HIDDEN], tables[MATRIX]), self.softcap)
        teacher_BCV = jnp.where(_ids(teacher_BCV, split) < self.vocab, teacher_BCV, NEVER)
        x_BCV, y_BCV = logits_BCV / self.temperature, teacher_BCV / self.temperature
        q_BCV, log_sum_q_BC = _softmax(x_BCV, split)
        p_BCV, log_sum_p_BC = _softmax(y_BCV, split)
        kl_BC = _over(jnp.sum(p_BCV * (y_BCV - x_BCV), axis=-1), split) - log_sum_p_BC + log_sum_q_BC
        return self.mixed(logits_BCV, kl_BC, q_BCV - p_BCV, sides, split)


@dataclass(frozen=True)
class WrittenDown(Mix):
    """Against the K likeliest tokens, by their logits below the highest, and the mass of all others at this
    temperature."""

    def __call__(self, logits_BCV: jax.Array, sides: Arrays, tables: Arrays, split: Split) -> tuple[Arrays, jax.Array]:
        tail_BC, ids_BCK = sides[TAIL], sides[IDS].astype(jnp.int32)
        log_p_BCK = jax.nn.log_softmax(sides[VALUES].astype(jnp.float32) / self.temperature)
        log_p_BCK = log_p_BCK + jnp.log1p(-tail_BC)[..., None]
        q_BCV, log_sum_BC = _softmax(logits_BCV / self.temperature, split)
        own = logits_BCV.shape[-1]
        here_BCK = ids_BCK - _first(own, split)
        is_here_BCK = (here_BCK >= 0) & (here_BCK < own)
        x_BCK = jnp.take_along_axis(logits_BCV, jnp.clip(here_BCK, 0, own - 1), axis=-1) / self.temperature
        x_BCK = _over(jnp.where(is_here_BCK, x_BCK, jnp.float32(0)), split)
        p_BCK = jnp.exp(log_p_BCK)
        wanted_BCV = _placed(jnp.full_like(q_BCV, -1), jnp.where(is_here_BCK, here_BCK, own), p_BCK)
        is_kept_BCV = wanted_BCV >= 0
        rest_BC = _over(jnp.sum(jnp.where(is_kept_BCV, jnp.float32(0), q_BCV), axis=-1), split)
        kl_BC = jnp.sum(p_BCK * (log_p_BCK - x_BCK + log_sum_BC[..., None]), axis=-1)
        kl_BC = kl_BC + tail_BC * (jnp.log(jnp.maximum(tail_BC, TINY)) - jnp.log(jnp.maximum(rest_BC, TINY)))
        share_BC = tail_BC / jnp.maximum(rest_BC, TINY)
        slope_BCV = q_BCV - jnp.where(is_kept_BCV, wanted_BCV, q_BCV * share_BC[..., None])
        return self.mixed(logits_BCV, kl_BC, slope_BCV, sides, split)


def _softmax(x_BCV: jax.Array, split: Split) -> tuple[jax.Array, jax.Array]:
    """Probabilities, and the logarithm of the sum of powers, over the whole vocabulary."""
    highest_BC = jnp.max(x_BCV, axis=-1)
    if split.vocab:
        highest_BC = lax.pmax(highest_BC, split.vocab)
    powers_BCV = jnp.exp(x_BCV - highest_BC[..., None])
    total_BC = _over(jnp.sum(powers_BCV, axis=-1), split)
    return powers_BCV / total_BC[..., None], jnp.log(total_BC) + highest_BC


def _over(part: jax.Array, split: Split) -> jax.Array:
    """The sum over the devices that each hold a part of the vocabulary."""
    return lax.psum(part, split.vocab) if split.vocab else part


def _first(own: int, split: Split) -> jax.Array:
    """The id that this device's part of the vocabulary begins with."""
    return own * lax.axis_index(split.vocab) if split.vocab else jnp.zeros((), jnp.int32)


def _ids(x_BCV: jax.Array, split: Split) -> jax.Array:
    own = x_BCV.shape[-1]
    return _first(own, split) + lax.broadcasted_iota(jnp.int32, x_BCV.shape, x_BCV.ndim - 1)


def _placed(x_BCV: jax.Array, at_BCK: jax.Array, values_BCK: jax.Array) -> jax.Array:
    """`x` with the values at their places; a place beyond its end is nobody's."""
    row = jax.vmap(lambda x_V, at_K, values_K: x_V.at[at_K].set(values_K, mode="drop"))
    return jax.vmap(row)(x_BCV, at_BCK, values_BCK)
