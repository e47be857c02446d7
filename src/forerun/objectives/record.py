"""Teacher logits to cache: the K most probable tokens at each position, and the mass of all other tokens (the tail).

Logits are stored relative to the highest one, in 16 bits. They are most exact near 0, where most of the probability is.
The tail is stored for each temperature at which the cache will be used, because it does not follow from the K logits.
B batch, S sequence, E embed, V vocab, C chunk, K kept, N temperatures.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from forerun.models.base import Readout
from forerun.nn.layers import soft_cap
from forerun.nn.sharding import batch_axes, by_hand, context_axis
from forerun.objectives.cross_entropy import in_chunks, logits_of

Record = tuple[jax.Array, jax.Array, jax.Array]  # values_BSK float16, ids_BSK int32, tails_BSN float32


def record(out: Readout, *, vocab: int, top_k: int, temperatures: tuple[float, ...], chunk: int) -> Record:
    """Return the K highest logits of each position, their token ids, and the tails.

    The logits of all positions never exist at the same time.

    Args:
      out: the teacher's hidden states and read-out matrix. The matrix must not be split over the axis tp.
      vocab: number of tokens to consider, from the first on: those that the student has too.
      top_k: number of tokens to keep, K.
      temperatures: temperatures of the tails.
      chunk: positions whose logits exist at one time.
    """
    local = partial(_record_local, softcap=out.softcap, top_k=top_k, temperatures=temperatures, chunk=chunk)
    rows = P(batch_axes(), context_axis(out.hidden_BSE.shape[1]), None)
    kept: Record = by_hand(local, arguments=(rows, P(None, None)), results=(rows, rows, rows))(
        out.hidden_BSE, out.matrix_VE[:vocab]
    )
    return kept


def _record_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    *,
    softcap: float | None,
    top_k: int,
    temperatures: tuple[float, ...],
    chunk: int,
) -> Record:
    def one(_: None, hidden_BCE: jax.Array) -> tuple[None, Record]:
        logits_BCV = soft_cap(logits_of(hidden_BCE, matrix_VE), softcap)
        # A top_k is a sort and a slice, which XLA's CPU compiler replaces by a TopK routine. Without the barrier, it
        # first merges later slices of `highest_BCK` with that slice. It then misses the pattern and sorts all V logits.
        # One barrier for both results would end the process: XLA for several CPU devices then finds no tuple element.
        highest_BCK, ids_BCK = lax.top_k(logits_BCV, top_k)
        highest_BCK = lax.optimization_barrier(highest_BCK)
        tails = [_tail(logits_BCV, highest_BCK, temperature) for temperature in temperatures]
        values_BCK = (highest_BCK - highest_BCK[..., :1]).astype(jnp.float16)
        return None, (values_BCK, ids_BCK, jnp.stack(tails, axis=-1))

    _, pieces = lax.scan(one, None, in_chunks(hidden_BSE, chunk))
    B, S = hidden_BSE.shape[:2]
    arrays = [jnp.moveaxis(piece, 0, 1).reshape(B, -1, piece.shape[-1])[:, :S] for piece in pieces]
    return arrays[0], arrays[1], arrays[2]


def _tail(logits_BCV: jax.Array, highest_BCK: jax.Array, temperature: float) -> jax.Array:
    """Return the probability mass of all tokens except the K most probable.

    The mass is summed directly: 1 - (sum of the K) would lose a small tail to rounding. Tokens whose logit equals the
    last of the K are counted, except those that are among the K.
    """
    K = highest_BCK.shape[-1]
    first, last = highest_BCK[..., :1], highest_BCK[..., -1:]
    powers_BCV = jnp.exp((logits_BCV - first) / temperature)
    below = jnp.sum(jnp.where(logits_BCV < last, powers_BCV, jnp.float32(0)), axis=-1)
    equal = jnp.sum(logits_BCV >= last, axis=-1) - K
    below = below + equal.astype(jnp.float32) * jnp.exp((last - first) / temperature)[..., 0]
    return below / jnp.sum(powers_BCV, axis=-1)
