"""Chunked cross entropy: the logits of all positions never exist at the same time.

The sequence is processed in chunks. The logits of a chunk are computed, reduced to the chunk's part of the loss and of
both gradients, and discarded. The gradients are computed in the forward pass, so the backward pass does not compute the
logits again. B batch, S sequence, E embed, V vocab, C chunk.

Collectives are explicit here. The automatic partitioner would reduce the matrix gradient over all devices after every
chunk. Instead, each device sums its own rows in float32, and the devices reduce this sum once, in the compute dtype.
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
from forerun.nn.sharding import BATCH_AXES, CONTEXT, EXPERT, ambient_sizes, batch_axes, by_hand, context_axis

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
    """Return the sum over positions of weight x -log p(target), in float32.

    It is differentiable by the hidden states and the matrix only.

    Args:
      hidden_BSE: hidden states of the model.
      matrix_VE: read-out matrix of the model.
      targets_BS: token ids to predict.
      weights_BS: weight of each position; 0 for positions without loss.
      chunk: positions whose logits exist at one time (`chunk_length`).
      softcap: cap of the model's logits, if it has one.
    """
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
    """Return the loss, and the gradients of hidden states and matrix for a cotangent of 1."""
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_loss_and_gradients_local, chunk=chunk, split=split)
    results = (P(), split.hidden_gradient, P(split.vocab, split.embed))
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
    """Return -log p(target) of every position [B, S] in float32.

    It is differentiable by the hidden states and the matrix. The weight of a position is its cotangent, which is known
    only in the backward pass. The backward pass therefore computes the logits a second time.
    """
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_nats_local, chunk=chunk, split=split)
    nats: jax.Array = by_hand(local, arguments=split.arguments[:3], results=P(batch_axes(), split.context))(
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
    """The mesh axes over which each dimension is split (None: it is not split), and the softcap of the logits."""

    rows: tuple[str, ...]  # axes of the batch and of the sequence: data, fsdp, expert and context, if they split them
    context: str | None  # of the sequence, in all arrays
    vocab: str | None  # of the matrix and the logits
    sequence: str | None  # also of the sequence, in the hidden gradient, which is split like the residual stream
    embed: tuple[str, ...] | None  # of the matrix gradient, which is split like the stored weight
    softcap: float | None

    @classmethod
    def of(cls, hidden_BSE: jax.Array, matrix_VE: jax.Array, softcap: float | None) -> Split:
        """Return the split on the ambient mesh. A dimension that its axis does not divide evenly is not split."""
        sizes = ambient_sizes()

        def axis(name: str, length: int) -> str | None:
            ways = sizes.get(name, 1)
            return name if ways > 1 and length % ways == 0 else None

        vocab = axis("tp", matrix_VE.shape[0])
        context = context_axis(hidden_BSE.shape[1])
        over_sequence = (context,) if context else ()
        own_positions = hidden_BSE.shape[1] // (sizes[CONTEXT] if context else 1)
        axes = (axis("fsdp", matrix_VE.shape[1]), axis(EXPERT, matrix_VE.shape[1]), *over_sequence)
        embed = tuple(name for name in axes if name)
        while matrix_VE.shape[1] % math.prod(sizes[name] for name in embed):
            embed = embed[:-1]
        return cls(
            rows=(*(name for name in BATCH_AXES if sizes.get(name, 1) > 1), *over_sequence),
            context=context,
            vocab=vocab,
            sequence=axis("tp", own_positions) if vocab else None,
            embed=embed or None,
            softcap=softcap,
        )

    @property
    def arguments(self) -> tuple[P, ...]:
        """Partition specs of hidden states, matrix, targets and weights."""
        positions = P(batch_axes(), self.context)
        return P(batch_axes(), self.context, None), P(self.vocab, None), positions, positions

    @property
    def hidden_gradient(self) -> P:
        """Partition spec of the gradient of the hidden states."""
        return P(batch_axes(), tuple(axis for axis in (self.context, self.sequence) if axis) or None, None)


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
        # Accumulate in float32: the sum over all chunks would lose precision in the compute dtype.
        more = jnp.einsum("BCV,BCE->VE", slope_BCV, hidden_BCE, preferred_element_type=jnp.float32)
        total = total + jnp.sum(nats_BC * weights_BC)
        return (total, matrix_gradient + more), jnp.einsum("BCV,VE->BCE", slope_BCV, matrix_VE)

    start = (jnp.zeros((), jnp.float32), jnp.zeros(matrix_VE.shape, jnp.float32))
    pieces = _chunks(hidden_BSE, targets_BS, weights_BS, chunk)
    (total, matrix_gradient), hidden_pieces = lax.scan(one, start, pieces)
    hidden_gradient = unchunked(hidden_pieces, hidden_BSE.shape)
    if split.vocab:  # each device has only the contribution of its part of the vocabulary
        hidden_gradient = summed(
            hidden_gradient, (split.vocab,), scatter=(split.sequence,) if split.sequence else None, dim=1
        )
    matrix_gradient = summed(matrix_gradient.astype(matrix_VE.dtype), split.rows, scatter=split.embed, dim=1)
    return lax.psum(total, split.rows), hidden_gradient, matrix_gradient


def summed(part: jax.Array, axes: tuple[str, ...], *, scatter: tuple[str, ...] | None, dim: int) -> jax.Array:
    """Return the sum over mesh axes. Along the axes `scatter`, each device keeps only its piece of dimension `dim`."""
    if scatter:
        part = lax.psum_scatter(part, scatter if len(scatter) > 1 else scatter[0], scatter_dimension=dim, tiled=True)
    return lax.psum(part, tuple(axis for axis in axes if axis not in (scatter or ())))


def logits_of(hidden_BCE: jax.Array, matrix_VE: jax.Array) -> jax.Array:
    """Return the logits in float32, before the softcap."""
    return jnp.einsum("BCE,VE->BCV", hidden_BCE, matrix_VE, preferred_element_type=jnp.float32)


def nats_and_slope(logits_BCV: jax.Array, targets_BC: jax.Array, split: Split) -> tuple[jax.Array, jax.Array]:
    """Return -log p(target) of each position, and its derivative by the logits before the softcap.

    V may be this device's part of the vocabulary.
    """
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
    # A comparison instead of a gather: the target may belong to another device's part, and then nothing matches.
    vocabulary = offset + lax.broadcasted_iota(jnp.int32, logits_BCV.shape, logits_BCV.ndim - 1)
    is_target = (vocabulary == targets_BC[..., None]).astype(jnp.float32)
    right = lax.psum(jnp.sum(logits_BCV * is_target, axis=-1), over)
    nats = jnp.log(total[..., 0]) + highest[..., 0] - right
    slope = powers / total - is_target
    return nats, slope if split.softcap is None else slope * (1 - jnp.square(logits_BCV / split.softcap))


def _chunks(hidden_BSE: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int) -> Chunk:
    return in_chunks(hidden_BSE, chunk), in_chunks(targets_BS, chunk), in_chunks(weights_BS, chunk)


def in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """Return [B, S, ...] as [S/C, B, C, ...]. The last chunk is padded with zeros, so its padding has weight 0."""
    fill = -x.shape[1] % chunk
    x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def unchunked(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the array before `in_chunks`, which had this shape [B, S, E]."""
    return jnp.moveaxis(x, 0, 1).reshape(shape[0], -1, shape[2])[:, : shape[1]]


def chunk_length(sequence: int, rows: int, vocab: int, limit_bytes: int = 512 << 20) -> int:
    """Return the number of positions per chunk: about the largest whose logits stay within the limit.

    Large chunks are faster, because the matrix and its gradient pass through memory once per chunk. A divisor of
    `sequence` is preferred if it is more than half of the largest, so that no chunk is padded.

    Args:
      sequence: positions of a row.
      rows: rows on one device.
      vocab: number of logits per position.
      limit_bytes: limit for the float32 logits of one chunk.
    """
    longest = min(sequence, max(1, limit_bytes // (4 * rows * vocab)))
    divisor = next(n for n in range(longest, 0, -1) if sequence % n == 0)
    return divisor if 2 * divisor > longest else math.ceil(sequence / math.ceil(sequence / longest))
