"""Cross-entropy whose full logits never exist.

The sequence is taken in chunks: a chunk's logits are made, turned into its share of the loss and of
both gradients, and forgotten. The gradients are computed on the way forward, so the logits are made
once, not again in the backward pass. B batch, S sequence, E embed, V vocab, C chunk.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from forerun.nn.sharding import constrain, over_batch

Chunk = tuple[jax.Array, jax.Array, jax.Array]  # hidden_BCE, targets_BC, weights_BC


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    hidden_BSE: jax.Array, matrix_VE: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int
) -> jax.Array:
    """Sum over positions of weight x nats, in float32. Differentiable in hidden and matrix."""

    def one(total: jax.Array, piece: Chunk) -> tuple[jax.Array, None]:
        hidden_BCE, targets_BC, weights_BC = piece
        logits_BCV = _logits(hidden_BCE, matrix_VE)
        return total + _nats(logits_BCV, _is_target(logits_BCV, targets_BC), weights_BC), None

    total, _ = jax.lax.scan(one, jnp.zeros((), jnp.float32), _chunks(hidden_BSE, targets_BS, weights_BS, chunk))
    return total


def _forward(
    hidden_BSE: jax.Array, matrix_VE: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss, and the gradients of hidden and matrix for a cotangent of one.

    Every device adds up the matrix gradient of its own rows in float32 and shares it once, at the
    end. Left to the partitioner, each chunk would end in a reduction over all devices.
    """
    local = partial(_forward_local, chunk=chunk)
    run = over_batch(local, arguments=("BSE", "VE", "BS", "BS"), results=("", "BSE", "VE"))
    total, hidden_gradient, matrix_gradient = run(hidden_BSE, matrix_VE, targets_BS, weights_BS)
    return total, (hidden_gradient, matrix_gradient)


def _forward_local(
    hidden_BSE: jax.Array, matrix_VE: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, *, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def one(carry: tuple[jax.Array, jax.Array], piece: Chunk) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        total, matrix_gradient = carry
        hidden_BCE, targets_BC, weights_BC = piece
        logits_BCV = _logits(hidden_BCE, matrix_VE)
        is_target = _is_target(logits_BCV, targets_BC)
        slope_BCV = (jax.nn.softmax(logits_BCV, axis=-1) - is_target) * weights_BC[..., None]
        slope_BCV = slope_BCV.astype(hidden_BCE.dtype)
        more = jnp.einsum("BCV,BCE->VE", slope_BCV, hidden_BCE, preferred_element_type=jnp.float32)
        total = total + _nats(logits_BCV, is_target, weights_BC)
        return (total, matrix_gradient + constrain(more, "VE")), jnp.einsum("BCV,VE->BCE", slope_BCV, matrix_VE)

    start = (jnp.zeros((), jnp.float32), jnp.zeros(matrix_VE.shape, jnp.float32))
    pieces = _chunks(hidden_BSE, targets_BS, weights_BS, chunk)
    (total, matrix_gradient), hidden_gradient = jax.lax.scan(one, start, pieces)
    return total, _unchunk(hidden_gradient, hidden_BSE.shape), matrix_gradient.astype(matrix_VE.dtype)


def _backward(
    chunk: int, gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden, matrix = gradients
    return hidden * cotangent.astype(hidden.dtype), matrix * cotangent.astype(matrix.dtype), None, None


cross_entropy.defvjp(_forward, _backward)


def _logits(hidden_BCE: jax.Array, matrix_VE: jax.Array) -> jax.Array:
    logits = jnp.einsum("BCE,VE->BCV", hidden_BCE, matrix_VE, preferred_element_type=jnp.float32)
    return constrain(logits, "BCV")


def _is_target(logits_BCV: jax.Array, targets_BC: jax.Array) -> jax.Array:
    """One-hot, by comparison: a gather along a vocabulary split over tp would fetch all of it."""
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits_BCV.shape, logits_BCV.ndim - 1)
    return (vocabulary == targets_BC[..., None]).astype(jnp.float32)


def _nats(logits_BCV: jax.Array, is_target_BCV: jax.Array, weights_BC: jax.Array) -> jax.Array:
    right = jnp.sum(logits_BCV * is_target_BCV, axis=-1)
    return jnp.sum((jax.nn.logsumexp(logits_BCV, axis=-1) - right) * weights_BC)


def _chunks(hidden_BSE: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int) -> Chunk:
    """[S/C, B, C, ...]; positions that fill up the last chunk weigh nothing."""

    def cut(x: jax.Array) -> jax.Array:
        fill = -x.shape[1] % chunk
        x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return cut(hidden_BSE), cut(targets_BS), cut(weights_BS)


def _unchunk(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.moveaxis(x, 0, 1).reshape(shape[0], -1, shape[2])[:, : shape[1]]


def chunk_length(sequence: int, rows: int, vocab: int, limit_bytes: int = 512 << 20) -> int:
    """The longest chunk whose float32 logits, for `rows` sequences on one device, stay in the limit.

    A divisor of the sequence if there is one near, so that nothing is padded. Longer is faster: the
    matrix and its gradient pass through memory once per chunk.
    """
    longest = min(sequence, max(1, limit_bytes // (4 * rows * vocab)))
    divisor = next(n for n in range(longest, 0, -1) if sequence % n == 0)
    return divisor if 2 * divisor > longest else math.ceil(sequence / math.ceil(sequence / longest))
