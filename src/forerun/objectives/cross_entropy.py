"""Cross-entropy whose full logits never exist.

The sequence is taken in chunks: a chunk's logits are made, turned into its share of the loss and of
both gradients, and forgotten. The gradients are computed on the way forward, so the logits are made
once, not again in the backward pass. B batch, S sequence, E embed, V vocab, C chunk.

Collectives are written out here. Left to the partitioner, every chunk would end in a reduction of
the matrix gradient over all devices; by hand, each device adds up its own rows in float32 and shares
the sum once, in the computing dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from forerun.nn.layers import soft_cap
from forerun.nn.sharding import BATCH_AXES, ambient_sizes, by_hand

Chunk = tuple[jax.Array, jax.Array, jax.Array]  # hidden_BCE, targets_BC, weights_BC


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    chunk: int,
    softcap: float | None = None,
) -> jax.Array:
    """Sum over positions of weight x nats, in float32. Differentiable in hidden and matrix."""
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_loss_local, chunk=chunk, split=split)
    total: jax.Array = by_hand(local, arguments=split.arguments, results=P())(
        hidden_BSE, matrix_VE, targets_BS, weights_BS
    )
    return total


def _forward(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    chunk: int,
    softcap: float | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss, and the gradients of hidden and matrix for a cotangent of one."""
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_loss_and_gradients_local, chunk=chunk, split=split)
    results = (P(), P(BATCH_AXES, split.sequence, None), P(split.vocab, split.embed))
    total, hidden_gradient, matrix_gradient = by_hand(local, arguments=split.arguments, results=results)(
        hidden_BSE, matrix_VE, targets_BS, weights_BS
    )
    return total, (hidden_gradient, matrix_gradient)


def _backward(
    chunk: int, softcap: float | None, gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden, matrix = gradients
    return hidden * cotangent.astype(hidden.dtype), matrix * cotangent.astype(matrix.dtype), None, None


cross_entropy.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_nats(
    hidden_BSE: jax.Array, matrix_VE: jax.Array, targets_BS: jax.Array, chunk: int, softcap: float | None = None
) -> jax.Array:
    """-log p(target) of every position [B, S] in float32. Differentiable in hidden and matrix: what each position
    weighs is known only when a gradient comes back, so the logits are made a second time then."""
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_nats_local, chunk=chunk, split=split)
    nats: jax.Array = by_hand(local, arguments=split.arguments[:3], results=P(BATCH_AXES, None))(
        hidden_BSE, matrix_VE, targets_BS
    )
    return nats


def _nats_forward(
    hidden_BSE: jax.Array, matrix_VE: jax.Array, targets_BS: jax.Array, chunk: int, softcap: float | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return token_nats(hidden_BSE, matrix_VE, targets_BS, chunk, softcap), (hidden_BSE, matrix_VE, targets_BS)


def _nats_backward(
    chunk: int, softcap: float | None, saved: tuple[jax.Array, jax.Array, jax.Array], cotangent_BS: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    _, (hidden_gradient, matrix_gradient) = _forward(*saved, cotangent_BS, chunk, softcap)
    return hidden_gradient, matrix_gradient, None


token_nats.defvjp(_nats_forward, _nats_backward)


@dataclass(frozen=True)
class Split:
    """Which mesh axes split what; None where nothing does. Rows lie on data x fsdp. And the logits' cap."""

    rows: tuple[str, ...]
    vocab: str | None  # the matrix and the logits
    sequence: str | None  # the hidden gradient, as the residual stream wants it
    embed: str | None  # the matrix gradient, as the weight rests
    softcap: float | None

    @classmethod
    def of(cls, hidden_BSE: jax.Array, matrix_VE: jax.Array, softcap: float | None) -> Split:
        sizes = ambient_sizes()

        def axis(name: str, length: int) -> str | None:
            ways = sizes.get(name, 1)
            return name if ways > 1 and length % ways == 0 else None

        vocab = axis("tp", matrix_VE.shape[0])
        return cls(
            rows=tuple(name for name in BATCH_AXES if sizes.get(name, 1) > 1),
            vocab=vocab,
            sequence=axis("tp", hidden_BSE.shape[1]) if vocab else None,
            embed=axis("fsdp", matrix_VE.shape[1]),
            softcap=softcap,
        )

    @property
    def arguments(self) -> tuple[P, ...]:
        return P(BATCH_AXES, None, None), P(self.vocab, None), P(BATCH_AXES, None), P(BATCH_AXES, None)


@jax.named_scope("loss")
def _nats_local(
    hidden_BSE: jax.Array, matrix_VE: jax.Array, targets_BS: jax.Array, *, chunk: int, split: Split
) -> jax.Array:
    def one(_: None, piece: Chunk) -> tuple[None, jax.Array]:
        hidden_BCE, targets_BC, _weights = piece
        return None, nats_and_slope(logits_of(hidden_BCE, matrix_VE), targets_BC, split)[0]

    _, pieces = lax.scan(one, None, _chunks(hidden_BSE, targets_BS, targets_BS, chunk))
    return unchunked(pieces[..., None], (*targets_BS.shape, 1))[..., 0]


@jax.named_scope("loss")
def _loss_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    chunk: int,
    split: Split,
) -> jax.Array:
    def one(total: jax.Array, piece: Chunk) -> tuple[jax.Array, None]:
        hidden_BCE, targets_BC, weights_BC = piece
        nats_BC, _ = nats_and_slope(logits_of(hidden_BCE, matrix_VE), targets_BC, split)
        return total + jnp.sum(nats_BC * weights_BC), None

    total, _ = lax.scan(one, jnp.zeros((), jnp.float32), _chunks(hidden_BSE, targets_BS, weights_BS, chunk))
    return lax.psum(total, split.rows)


@jax.named_scope("loss")
def _loss_and_gradients_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    chunk: int,
    split: Split,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def one(carry: tuple[jax.Array, jax.Array], piece: Chunk) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        total, matrix_gradient = carry
        hidden_BCE, targets_BC, weights_BC = piece
        nats_BC, slope_BCV = nats_and_slope(logits_of(hidden_BCE, matrix_VE), targets_BC, split)
        slope_BCV = (slope_BCV * weights_BC[..., None]).astype(hidden_BCE.dtype)
        more = jnp.einsum("BCV,BCE->VE", slope_BCV, hidden_BCE, preferred_element_type=jnp.float32)
        total = total + jnp.sum(nats_BC * weights_BC)
        return (total, matrix_gradient + more), jnp.einsum("BCV,VE->BCE", slope_BCV, matrix_VE)

    start = (jnp.zeros((), jnp.float32), jnp.zeros(matrix_VE.shape, jnp.float32))
    pieces = _chunks(hidden_BSE, targets_BS, weights_BS, chunk)
    (total, matrix_gradient), hidden_pieces = lax.scan(one, start, pieces)
    hidden_gradient = unchunked(hidden_pieces, hidden_BSE.shape)
    if split.vocab:
        hidden_gradient = summed(hidden_gradient, (split.vocab,), scatter=split.sequence, dim=1)
    matrix_gradient = summed(matrix_gradient.astype(matrix_VE.dtype), split.rows, scatter=split.embed, dim=1)
    return lax.psum(total, split.rows), hidden_gradient, matrix_gradient


def summed(part: jax.Array, axes: tuple[str, ...], *, scatter: str | None, dim: int) -> jax.Array:
    """The sum over mesh axes; along `scatter` every device keeps only its own piece of it."""
    if scatter:
        part = lax.psum_scatter(part, scatter, scatter_dimension=dim, tiled=True)
    return lax.psum(part, tuple(axis for axis in axes if axis != scatter))


def logits_of(hidden_BCE: jax.Array, matrix_VE: jax.Array) -> jax.Array:
    return jnp.einsum("BCE,VE->BCV", hidden_BCE, matrix_VE, preferred_element_type=jnp.float32)


def nats_and_slope(logits_BCV: jax.Array, targets_BC: jax.Array, split: Split) -> tuple[jax.Array, jax.Array]:
    """Per position -log p(target), and its derivative by the bare logits. V may be this device's part of it."""
    own = logits_BCV.shape[-1]
    logits_BCV = soft_cap(logits_BCV, split.softcap)
    highest = jnp.max(logits_BCV, axis=-1, keepdims=True)
    over = (split.vocab,) if split.vocab else ()
    offset = jnp.zeros((), jnp.int32)
    if split.vocab:
        highest = lax.pmax(highest, split.vocab)
        offset = own * lax.axis_index(split.vocab)
    powers = jnp.exp(logits_BCV - highest)
    total = lax.psum(jnp.sum(powers, axis=-1, keepdims=True), over)
    vocabulary = offset + lax.broadcasted_iota(jnp.int32, logits_BCV.shape, logits_BCV.ndim - 1)
    is_target = (vocabulary == targets_BC[..., None]).astype(jnp.float32)
    right = lax.psum(jnp.sum(logits_BCV * is_target, axis=-1), over)
    nats = jnp.log(total[..., 0]) + highest[..., 0] - right
    slope = powers / total - is_target
    return nats, slope if split.softcap is None else slope * (1 - jnp.square(logits_BCV / split.softcap))


def _chunks(hidden_BSE: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int) -> Chunk:
    return in_chunks(hidden_BSE, chunk), in_chunks(targets_BS, chunk), in_chunks(weights_BS, chunk)


def in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[B, S, ...] as [S/C, B, C, ...]; positions that fill up the last chunk are zeros, so they weigh nothing."""
    fill = -x.shape[1] % chunk
    x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def unchunked(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `in_chunks` for an array of this shape, [B, S, E]."""
    return jnp.moveaxis(x, 0, 1).reshape(shape[0], -1, shape[2])[:, : shape[1]]


def chunk_length(sequence: int, rows: int, vocab: int, limit_bytes: int = 512 << 20) -> int:
    """The longest chunk whose float32 logits, for `rows` sequences on one device, stay in the limit.

    A divisor of the sequence if there is one near, so that nothing is padded. Longer is faster: the
    matrix and its gradient pass through memory once per chunk.
    """
    longest = min(sequence, max(1, limit_bytes // (4 * rows * vocab)))
    divisor = next(n for n in range(longest, 0, -1) if sequence % n == 0)
    return divisor if 2 * divisor > longest else math.ceil(sequence / math.ceil(sequence / longest))
