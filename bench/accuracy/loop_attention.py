"""Attention of published runs without a kernel. It is only compiled (tpu_worker.py), never run.

`plain_attention` has its scores in the compute dtype, as MaxText had until the summer of 2023. There, all scores were
in memory at one time; today's compiler needs too much memory for that, so queries are in blocks here.

`loop_attention` has loops over blocks of 1,024, as Levanter did in 2025 for heads that the splash kernel rejected. For
each block of queries, a loop over the blocks of keys up to the diagonal keeps a running maximum and sum, all in the
compute dtype. The backward pass computes the scores again. Here, the outer loops are unrolled, so that the compiler
knows how often each inner loop runs; the work is the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 1024
HIDDEN = -1e10


def loop_attention(
    q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array, scores: Any, block: int
) -> jax.Array:
    """Return causal attention within each segment, [B, S, H, D]: the arguments of `forerun.nn.attention._blockwise`."""
    B, S, H, D = q_BSHD.shape
    K = k_BSKD.shape[2]
    q = (q_BSHD * jnp.asarray(scores.scale, q_BSHD.dtype)).reshape(B, S, K, H // K, D)
    return _attention(q, k_BSKD, v_BSKD, segments_BS).reshape(q_BSHD.shape)


def plain_attention(
    q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array, scores: Any, block: int
) -> jax.Array:
    """Return causal attention within each segment, [B, S, H, D], with the scores of 128 queries at one time."""
    block = 128
    B, S, H, D = q_BSHD.shape
    K = k_BSKD.shape[2]
    places = jnp.arange(S)

    @jax.checkpoint
    def one(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, segments, start = piece
        found = jnp.einsum("BTKGD,BSKD->BKGTS", q, k_BSKD)
        seen = (start + jnp.arange(block))[:, None] >= places
        seen &= segments[:, :, None] == segments_BS[:, None, :]
        shares = jax.nn.softmax(jnp.where(seen[:, None, None], found, jnp.asarray(HIDDEN, found.dtype)), axis=-1)
        return jnp.einsum("BKGTS,BSKD->BTKGD", shares, v_BSKD)

    q = (q_BSHD * jnp.asarray(scores.scale, q_BSHD.dtype)).reshape(B, S // block, block, K, H // K, D)
    segments = segments_BS.reshape(B, S // block, block)
    starts = jnp.arange(S // block) * block
    out = jax.lax.map(one, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(segments, 1, 0), starts))
    return jnp.moveaxis(out, 0, 1).reshape(q_BSHD.shape)


@jax.custom_vjp
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    return _forward(q, k, v, segments)[0]


def _part(x: jax.Array, n: Any) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, n * BLOCK, BLOCK, axis=1)


def _scores(q: jax.Array, k: jax.Array, segments: jax.Array, i: Any, j: Any) -> jax.Array:
    """Return the masked scores of a block of queries i and a block of keys j, [B, K, G, T, S]."""
    found = jnp.einsum("BTKGD,BSKD->BKGTS", q, k)
    places = jnp.arange(BLOCK)
    seen = (i * BLOCK + places)[:, None] >= (j * BLOCK + places)[None, :]
    same = _part(segments, i)[:, :, None] == _part(segments, j)[:, None, :]
    return jnp.where((seen & same)[:, None, None], found, jnp.asarray(HIDDEN, found.dtype))


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> tuple[jax.Array, Any]:
    B, S, K, G, D = q.shape
    outs, sums = [], []
    for i in range(S // BLOCK):
        q_i = _part(q, i)

        def one(j: Any, carry: Any, q_i: jax.Array = q_i, i: int = i) -> Any:
            out, total, highest = carry
            s = _scores(q_i, _part(k, j), segments, i, j)
            new = jnp.maximum(highest, jnp.max(s, axis=-1))
            p = jnp.exp(s - new[..., None])
            less = jnp.exp(highest - new)
            total = less * total + jnp.sum(p, axis=-1)
            return less[..., None] * out + jnp.einsum("BKGTS,BSKD->BKGTD", p, _part(v, j)), total, new

        shape = (B, K, G, BLOCK)
        start = (jnp.zeros((*shape, D), q.dtype), jnp.zeros(shape, q.dtype), jnp.full(shape, -jnp.inf, q.dtype))
        out, total, highest = jax.lax.fori_loop(0, i + 1, one, start)
        outs.append(jnp.moveaxis(out / total[..., None], 3, 1))
        sums.append(highest + jnp.log(total))
    out, logs = jnp.concatenate(outs, axis=1), jnp.concatenate(sums, axis=-1)
    return out, (q, k, v, segments, out, logs)


def _backward(kept: Any, given: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, out, logs = kept
    inner = jnp.sum(given * out, axis=-1)  # [B, S, K, G]
    blocks = q.shape[1] // BLOCK
    dq, dks, dvs = jnp.zeros_like(q), [], []
    for j in range(blocks):
        k_j, v_j = _part(k, j), _part(v, j)

        def one(i: Any, carry: Any, k_j: jax.Array = k_j, v_j: jax.Array = v_j, j: int = j) -> Any:
            dq, dk, dv = carry
            q_i, given_i = _part(q, i), _part(given, i)
            log_i = jax.lax.dynamic_slice_in_dim(logs, i * BLOCK, BLOCK, axis=3)
            p = jnp.exp(_scores(q_i, k_j, segments, i, j) - log_i[..., None])
            dp = jnp.einsum("BTKGD,BSKD->BKGTS", given_i, v_j)
            ds = (p * (dp - jnp.moveaxis(_part(inner, i), 1, 3)[..., None])).astype(q.dtype)
            dv = dv + jnp.einsum("BKGTS,BTKGD->BSKD", p, given_i)
            dk = dk + jnp.einsum("BKGTS,BTKGD->BSKD", ds, q_i)
            new = _part(dq, i) + jnp.einsum("BKGTS,BSKD->BTKGD", ds, k_j)
            return jax.lax.dynamic_update_slice_in_dim(dq, new, i * BLOCK, axis=1), dk, dv

        dq, dk, dv = jax.lax.fori_loop(j, blocks, one, (dq, jnp.zeros_like(k_j), jnp.zeros_like(v_j)))
        dks.append(dk)
        dvs.append(dv)
    return dq, jnp.concatenate(dks, axis=1), jnp.concatenate(dvs, axis=1), None


_attention.defvjp(_forward, _backward)
