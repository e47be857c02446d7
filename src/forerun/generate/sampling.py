"""Which token comes next: the likeliest, or a random one of those that temperature, top-k and top-p leave.

B rows, V vocabulary. In the order of transformers: temperature, then top-k, then top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from forerun.errors import UserError

NOT_A_NUMBER = -1  # chosen where the logits are not finite


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token. `top_k` and `top_p` narrow the choice; None leaves it open."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature {self.temperature} cannot be used",
                why="it divides the logits: 0 takes the likeliest token, 1 samples what the model says",
                fix="a number from 0 to about 2",
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(
                f"top-k {self.top_k} leaves no token", why="it is how many tokens may be chosen", fix="1 or more"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                f"top-p {self.top_p} is not a share of probability", why="it is above 0, at most 1", fix="such as 0.9"
            )

    @property
    def rule(self) -> Rule:
        if self.temperature == 0:
            return Rule(greedy=True)
        return Rule(False, self.top_k, None if self.top_p == 1 else self.top_p)


@dataclass(frozen=True)
class Rule:
    """What a program is compiled for; the temperature is one of its arguments."""

    greedy: bool
    top_k: int | None = None
    top_p: float | None = None


def choose(logits_BV: jax.Array, keys_B: jax.Array, temperature: jax.Array, rule: Rule, vocab: int) -> jax.Array:
    """One token per row, each by its own key. Ids from `vocab` on only fill the embedding up: never chosen."""
    real = jnp.arange(logits_BV.shape[-1]) < vocab
    logits_BV = jnp.where(real, logits_BV.astype(jnp.float32), -jnp.inf)
    highest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    if rule.greedy:
        chosen_B = jnp.argmax(logits_BV, axis=-1)
    else:
        scaled_BV = (logits_BV - highest_B1) / temperature  # the highest is 0, however cold it is
        chosen_B = jax.vmap(jax.random.categorical)(keys_B, narrowed(scaled_BV, rule))
    return jnp.where(jnp.isfinite(highest_B1[:, 0]), chosen_B.astype(jnp.int32), NOT_A_NUMBER)


def narrowed(logits_BV: jax.Array, rule: Rule) -> jax.Array:
    """Minus infinity for what top-k and top-p leave out. Equal logits stay or go together."""
    if rule.top_k is not None:
        # Without the barrier the slice below is merged with that of the top_k, and a CPU sorts the whole vocabulary.
        best_BK, _ = jax.lax.optimization_barrier(jax.lax.top_k(logits_BV, min(rule.top_k, logits_BV.shape[-1])))
        logits_BV = jnp.where(logits_BV >= best_BK[:, -1:], logits_BV, -jnp.inf)
    if rule.top_p is not None:
        shares_BV = jax.nn.softmax(logits_BV, axis=-1)
        logits_BV = jnp.where(shares_BV >= _least_share(shares_BV, rule.top_p), logits_BV, -jnp.inf)
    return logits_BV


def _least_share(shares_BV: jax.Array, top_p: float) -> jax.Array:
    """The largest share such that all from it on reach `top_p` together, [B, 1].

    Found by halving, over the bits of a float: those of positive floats are in the order of their values, so 30 sums
    are exact, where sorting a vocabulary takes many times as long.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        enough_B1, too_high_B1 = bounds
        middle_B1 = enough_B1 + (too_high_B1 - enough_B1) // 2
        kept_BV = shares_BV >= jax.lax.bitcast_convert_type(middle_B1, jnp.float32)
        reached_B1 = jnp.sum(jnp.where(kept_BV, shares_BV, 0.0), axis=-1, keepdims=True) >= top_p
        return jnp.where(reached_B1, middle_B1, enough_B1), jnp.where(reached_B1, too_high_B1, middle_B1)

    above_one = np.float32(1).view(np.int32) + 1
    rows = (shares_BV.shape[0], 1)
    start = (jnp.zeros(rows, jnp.int32), jnp.full(rows, above_one, jnp.int32))
    enough_B1, _ = jax.lax.fori_loop(0, int(above_one).bit_length(), halve, start)
    return jax.lax.bitcast_convert_type(enough_B1, jnp.float32)
