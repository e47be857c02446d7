"""What is written down of a teacher: its K likeliest tokens at every position, and how much it gives to all others.

Logits are kept as their distance from the highest, which is 0, in 16 bits: near the top, where the probability is,
they are most exact. The mass of the rest is kept for each temperature that the record is to serve, since it does not
follow from the K alone. B batch, S sequence, E embed, V vocab, C chunk, K kept, N temperatures.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from forerun.models.base import Readout
from forerun.nn.layers import soft_cap
from forerun.nn.sharding import BATCH_AXES, by_hand
from forerun.objectives.cross_entropy import in_chunks, logits_of

Record = tuple[jax.Array, jax.Array, jax.Array]  # values_BSK float16, ids_BSK int32, tails_BSN float32


def record(out: Readout, *, vocab: int, top_k: int, temperatures: tuple[float, ...], chunk: int) -> Record:
    """Of the first `vocab` tokens; the full logits never exist. Not for a read-out that tp splits."""
    local = partial(_record_local, softcap=out.softcap, top_k=top_k, temperatures=temperatures, chunk=chunk)
    rows = P(BATCH_AXES, None, None)
    made: Record = by_hand(local, arguments=(rows, P(None, None)), results=(rows, rows, rows))(
        out.hidden_BSE, out.matrix_VE[:vocab]
    )
    return made


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
        # A top_k is a sort and a slice, which XLA's CPU compiler replaces by a TopK routine. Slices of `highest_BCK`
        # would be merged with that slice first: the pattern would be gone, and all V logits would be sorted.
        highest_BCK, ids_BCK = lax.optimization_barrier(lax.top_k(logits_BCV, top_k))
        tails = [_tail(logits_BCV, highest_BCK, temperature) for temperature in temperatures]
        values_BCK = (highest_BCK - highest_BCK[..., :1]).astype(jnp.float16)
        return None, (values_BCK, ids_BCK, jnp.stack(tails, axis=-1))

    _, pieces = lax.scan(one, None, in_chunks(hidden_BSE, chunk))
    B, S = hidden_BSE.shape[:2]
    whole = [jnp.moveaxis(piece, 0, 1).reshape(B, -1, piece.shape[-1])[:, :S] for piece in pieces]
    return whole[0], whole[1], whole[2]


def _tail(logits_BCV: jax.Array, highest_BCK: jax.Array, temperature: float) -> jax.Array:
    """The mass of all but the K likeliest, added up itself: 1 - (sum of the K) would lose a small one.

    Tokens as likely as the last of the K count as so many of them as are not kept.
    """
    K = highest_BCK.shape[-1]
    first, last = highest_BCK[..., :1], highest_BCK[..., -1:]
    powers_BCV = jnp.exp((logits_BCV - first) / temperature)
    below = jnp.sum(jnp.where(logits_BCV < last, powers_BCV, jnp.float32(0)), axis=-1)
    equal = jnp.sum(logits_BCV >= last, axis=-1) - K
    below = below + equal.astype(jnp.float32) * jnp.exp((last - first) / temperature)[..., 0]
    return below / jnp.sum(powers_BCV, axis=-1)
