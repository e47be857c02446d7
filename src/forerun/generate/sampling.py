"""Choice of the next token: greedy, or random sampling with temperature, top-k and top-p.

B rows, V vocabulary. The order is that of transformers: temperature, then top-k, then top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from forerun.errors import UserError

NOT_A_NUMBER = -1  # the result for a row whose logits are not finite


@dataclass(frozen=True)
class Sampling:
    """Settings of random sampling.

    Temperature 0 chooses the most probable token. `top_k` and `top_p` restrict the choice, unless they are None.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                "E-GENERATE-005",
                f"temperature {self.temperature} cannot be used",
                why="it divides the logits: 0 takes the likeliest token, 1 keeps the probabilities of the model",
                fix="use a number from 0 to about 2",
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(
                "E-GENERATE-006",
                f"top-k {self.top_k} leaves no token",
                why="it is the number of tokens to choose from",
                fix="use 1 or more",
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                "E-GENERATE-007",
                f"top-p {self.top_p} is not a probability",
                why="it must be above 0 and at most 1",
                fix="use a value such as 0.9",
            )

    @property
    def rule(self) -> Rule:
        """The settings for which a program is compiled."""
        if self.temperature == 0:
            return Rule(greedy=True)
        return Rule(False, self.top_k, None if self.top_p == 1 else self.top_p)


@dataclass(frozen=True)
class Rule:
    """Sampling settings for which a program is compiled. The temperature is an argument of the program instead."""

    greedy: bool
    top_k: int | None = None
    top_p: float | None = None


def choose(logits_BV: jax.Array, keys_B: jax.Array, temperature: jax.Array, rule: Rule, vocab: int) -> jax.Array:
    """Return one token per row, [B], or NOT_A_NUMBER for a row whose logits are not finite.

    Args:
        logits_BV: The logits of the next token.
        keys_B: A random key for each row.
        temperature: The temperature; ignored if the rule is greedy.
        rule: The sampling settings.
        vocab: The number of real ids. Higher ids are padding of the embedding and are never chosen.
    """
    real = jnp.arange(logits_BV.shape[-1]) < vocab
    logits_BV = jnp.where(real, logits_BV.astype(jnp.float32), -jnp.inf)
    highest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    if rule.greedy:
        chosen_B = jnp.argmax(logits_BV, axis=-1)
    else:
        scaled_BV = (logits_BV - highest_B1) / temperature  # the highest is 0 at any temperature
        chosen_B = jax.vmap(jax.random.categorical)(keys_B, narrowed(scaled_BV, rule))
    return jnp.where(jnp.isfinite(highest_B1[:, 0]), chosen_B.astype(jnp.int32), NOT_A_NUMBER)


def narrowed(logits_BV: jax.Array, rule: Rule) -> jax.Array:
    """Return the logits with minus infinity for tokens that top-k and top-p exclude.

    Tokens with equal logits are either all kept or all excluded.
    """
    if rule.top_k is not None:
        # Without the barrier, XLA merges the slice below with that of top_k, and a CPU sorts the complete vocabulary.
        # One barrier for both results of top_k would end the process: see program/recording.py.
        best_BK = jax.lax.optimization_barrier(jax.lax.top_k(logits_BV, min(rule.top_k, logits_BV.shape[-1]))[0])
        logits_BV = jnp.where(logits_BV >= best_BK[:, -1:], logits_BV, -jnp.inf)
    if rule.top_p is not None:
        shares_BV = jax.nn.softmax(logits_BV, axis=-1)
        logits_BV = jnp.where(shares_BV >= _least_share(shares_BV, rule.top_p), logits_BV, -jnp.inf)
    return logits_BV


def _least_share(shares_BV: jax.Array, top_p: float) -> jax.Array:
    """Return the largest probability such that all tokens of at least that probability sum to `top_p`, [B, 1].

    This is a binary search over the bits of a float: positive floats have the same order as their bits as integers.
    About 30 sums give the exact result, and sorting a vocabulary would take many times as long.
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
