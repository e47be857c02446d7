"""Ring attention with splash kernels, for `ring_attention.py`.

A device has an early and a late chunk of each sequence. In every step it computes two products of chunks: of its late
queries with the early keys that have arrived, and of the queries and keys of the kind that sees more.

Letters: T positions on one device, N positions of a chunk, H query heads, K kv heads, G query heads per kv head, D
head.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from forerun.nn.attention import RESIDUAL, Kernel
from forerun.nn.context import FUSED_BYTES
from forerun.nn.sharding import CONTEXT

UNMASKED = "unmasked_chunks"  # in the names of the kernels without a mask


@dataclass(frozen=True)
class ChunkProduct:
    """Attention of a chunk of queries to a chunk of keys, for all heads: the forward and the backward kernels."""

    length: int
    group: int
    block: int
    fused: bool
    causal: bool
    interpret: bool

    def kernel(self) -> Any:
        block = math.gcd(self.length, self.block)
        mask = (masks.CausalMask if self.causal else masks.FullMask)((self.length, self.length))
        sizes = splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=None if self.fused else block,
            block_kv_dq=None if self.fused else block,
            use_fused_bwd_kernel=self.fused,
        )
        return splash.make_splash_mha(
            mask=masks.MultiHeadMask([mask] * self.group),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )

    def _named(self) -> Any:
        return nullcontext() if self.causal else jax.named_scope(UNMASKED)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> tuple[jax.Array, jax.Array]:
        """Return the output [K, G, N, D] and the log-sum-exp [K, G, N]."""
        made = self.kernel()

        def of_head(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, (logsumexp,) = splash._splash_attention_forward(
                made.fwd_mask_info,
                q,
                k,
                v,
                ids,
                None,
                mask_value=splash.DEFAULT_MASK_VALUE,
                is_mqa=False,
                block_sizes=made.kwargs["block_sizes"],
                residual_checkpoint_name=None,
                save_residuals=True,
                mask_function=made.kwargs["mask_function"],
                interpret=self.interpret,
            )
            return out, logsumexp

        with self._named():
            out, logsumexp = jax.vmap(of_head)(q, k, v)
        return out, logsumexp

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, logsumexp: jax.Array, do: jax.Array, di: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gradients of queries, keys and values. `logsumexp` is that of all keys of the sequence."""
        made = self.kernel()
        sizes = made.kwargs["block_sizes"]
        shared = {
            "is_mqa": False,
            "mask_value": splash.DEFAULT_MASK_VALUE,
            "attn_logits_soft_cap": None,
            "q_layout": sizes.q_layout,
            "k_layout": sizes.k_layout,
            "v_layout": sizes.v_layout,
            "mask_function": made.kwargs["mask_function"],
            "interpret": self.interpret,
        }

        def of_head(*arrays: jax.Array) -> Any:
            q, k, v, logsumexp, do, di = arrays
            given = q, k, v, ids, None, logsumexp, do, di
            dq, dk, dv = splash._splash_attention_bwd_dkv(
                *given,
                bq=sizes.block_q_dkv,
                bkv=sizes.block_kv_dkv,
                bkv_compute=sizes.block_kv_dkv_compute,
                mask_info=made.dkv_mask_info,
                use_fused_bwd_kernel=self.fused,
                **shared,
            )
            if not self.fused:
                dq = splash._splash_attention_bwd_dq(
                    *given, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=made.dq_mask_info, **shared
                )
            return dq, dk, dv

        with self._named():
            dq, dk, dv = jax.vmap(of_head)(q, k, v, logsumexp, do, di)
        return dq, dk, dv


@dataclass(frozen=True)
class Ring:
    """Attention with keys and values that travel around the context axis. Batch size 1.

    Arrays have a dimension of the two chunks of a device in front: [2, K, G, N, D], and G = 1 for keys and values.
    """

    devices: int
    full: ChunkProduct
    causal: ChunkProduct

    def forward(self, q: Any, k: Any, v: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
        arrived = self._passed((k, v, ids))
        early = _parted(self.causal.forward(q[0], k[0], v[0], splash.SegmentIds(ids[0], ids[0])))
        late = _parted(self.causal.forward(q[1], k[1], v[1], splash.SegmentIds(ids[1], ids[1])))
        late = _merged(late, self.full.forward(q[1], k[0], v[0], splash.SegmentIds(ids[1], ids[0])))
        out, total = (jnp.stack(pair) for pair in zip(early, late, strict=True))

        def step(carry: Any, number: jax.Array) -> Any:
            (k, v, kv_ids), out, total = carry
            following = self._passed((k, v, kv_ids))
            found = self.full.forward(q[1], k[0], v[0], splash.SegmentIds(ids[1], kv_ids[0]))
            late = _merged((out[1], total[1]), found)
            out, total = out.at[1].set(late[0]), total.at[1].set(late[1])
            own = self._chunk(number)
            mine = splash.SegmentIds(_at(ids, own), _at(kv_ids, own))
            found = self.full.forward(_at(q, own), _at(k, own), _at(v, own), mine)
            merged = _merged((_at(out, own), _at(total, own)), found)
            return (following, _put(out, own, merged[0]), _put(total, own, merged[1])), None

        (_, out, total), _ = jax.lax.scan(step, (arrived, out, total), jnp.arange(1, self.devices))
        return out.astype(q.dtype), total

    def backward(self, kept: Any, do: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        q, k, v, ids, out, total = kept
        di = jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
        arrived = self._passed((k, v, ids))

        def product(kernel: ChunkProduct, k: Any, v: Any, kv_ids: Any, mine: Any, theirs: Any) -> Any:
            segments = splash.SegmentIds(_at(ids, mine), _at(kv_ids, theirs))
            found = kernel.backward(
                _at(q, mine), _at(k, theirs), _at(v, theirs), segments, _at(total, mine), _at(do, mine), _at(di, mine)
            )
            return tuple(one.astype(jnp.float32) for one in found)

        def added(sums: Any, found: Any, mine: Any, theirs: Any) -> Any:
            dq, dk, dv = sums
            return dq.at[mine].add(found[0]), dk.at[theirs].add(found[1]), dv.at[theirs].add(found[2])

        sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        for kernel, mine, theirs in ((self.causal, 0, 0), (self.causal, 1, 1), (self.full, 1, 0)):
            sums = added(sums, product(kernel, k, v, ids, mine, theirs), mine, theirs)

        def step(carry: Any, number: jax.Array) -> Any:
            here, (dq, dk, dv) = carry
            following, (dk, dv) = self._passed(here), self._passed((dk, dv))
            k, v, kv_ids = here
            late = product(self.full, k, v, kv_ids, 1, 0)
            own = self._chunk(number)
            other = product(self.full, k, v, kv_ids, own, own)
            sums = added(added((dq, dk, dv), late, 1, 0), other, own, own)
            return (following, sums), None

        (_, (dq, dk, dv)), _ = jax.lax.scan(step, (arrived, sums), jnp.arange(1, self.devices))
        dk, dv = self._passed((dk, dv))
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    def _chunk(self, number: jax.Array) -> jax.Array:
        """Return the chunk whose queries see the keys' chunk of the same kind, from the device `number` before."""
        return jnp.where(jax.lax.axis_index(CONTEXT) >= number, 0, 1)

    def _passed(self, arrays: Any) -> Any:
        route = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT, route), arrays)


def _at(x: jax.Array, index: Any) -> jax.Array:
    return x[index] if isinstance(index, int) else jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)


def _parted(found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return found[0].astype(jnp.float32), found[1]


def _merged(sums: tuple[jax.Array, jax.Array], found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the attention to two sets of keys from the outputs and log-sum-exps of both."""
    total = jnp.logaddexp(sums[1], found[1])
    old, new = (jnp.exp(part - total)[..., None] for part in (sums[1], found[1]))
    return sums[0] * old + found[0].astype(jnp.float32) * new, total


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return ring.forward(q, k, v, ids)[0]


def _ring_forward(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> Any:
    # As for splash, a remat policy can keep the outputs. Then the backward pass does not run the forward pass again.
    out, total = (checkpoint_name(x, RESIDUAL) for x in ring.forward(q, k, v, ids))
    return out, (q, k, v, ids, out, total)


ring_attention.defvjp(_ring_forward, Ring.backward)


def ring_local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, *, kernel: Kernel, devices: int) -> jax.Array:
    """Return the attention of the queries on one device, [1, T, H, D]."""
    _, T, H, D = q.shape
    K = k.shape[2]

    def chunks(x: jax.Array) -> jax.Array:
        """Return [1, T, K x G, D] as [2, K, G, N, D]."""
        return x.reshape(2, T // 2, K, -1, D).transpose(0, 2, 3, 1, 4)

    block = math.gcd(T // 2, kernel.block)
    fused = kernel.fused_backward and T // 2 // block * q.nbytes // 2 <= FUSED_BYTES
    fused = fused and (kernel.fused_length is None or kernel.fused_length >= T // 2)
    product = partial(
        ChunkProduct, T // 2, H // K, block, fused, interpret=jax.default_backend() == "cpu" and T <= 1024
    )
    ring = Ring(devices, product(causal=False), product(causal=True))
    scaled = chunks(q * D**-0.5)
    out = ring_attention(ring, scaled, chunks(k), chunks(v), ids.reshape(2, T // 2))
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)
