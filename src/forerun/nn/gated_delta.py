"""The gated delta rule: a linear recurrence with a matrix state, computed in chunks or one token at a time.

For each head, a token decays the state by exp(g), reads it with its key, and writes the difference to its value:

    state = exp(g) * state
    state = state + k (beta * (v - k state))
    out   = q state

Letters: B batch, S sequence, T new tokens, N groups, G chunks of a group, C tokens of a chunk. H are heads of values,
and K heads of keys. D is a head of keys and queries, W a head of values. Queries and keys are normalized to length 1
here. Everything is float32 inside, and the result has the dtype of the values.

Inside a chunk, all writes are the solution of a triangular system (Yang et al., Parallelizing Linear Transformers with
the Delta Rule, arXiv 2406.06484). The state changes only from chunk to chunk. Segments separate packed documents, and
the state never crosses from one document into the next. The tokens of a document must be adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from forerun.nn.attention import RESIDUAL
from forerun.nn.sharding import constrain

CHUNK = 128  # bench/gated_delta.py compares lengths by the planned time of a step
GROUP = 1  # chunks of one scan step; the backward pass keeps one state for each step
EPSILON = 1e-6  # of the norm of queries and keys


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule. S is T for new tokens of a generation."""

    q_BSKD: jax.Array
    k_BSKD: jax.Array
    v_BSHW: jax.Array  # H is a multiple of K
    g_BSH: jax.Array  # logarithm of the decay, at most 0
    beta_BSH: jax.Array  # strength of a write, from 0 to 1


@jax.named_scope("gated_delta")
def gated_delta_rule(
    inputs: DeltaInputs, segments_BS: jax.Array, *, chunk: int = CHUNK, group: int = GROUP
) -> jax.Array:
    """Return the output of the gated delta rule, [B, S, H, W], with an empty state at the start of each document.

    The backward pass keeps the output and the states between groups of chunks, both named `attention_out`, and
    recomputes one group at a time. If a remat policy keeps them, the backward pass does not compute the states again.

    Args:
        inputs: Queries, keys, values, decays and strengths.
        segments_BS: The document of each position.
        chunk: The number of tokens of a chunk, a power of two.
        group: The number of chunks that are computed together.
    """
    start = _empty_state(inputs)
    nowhere_B = jnp.full_like(segments_BS[:, 0], -2)  # no document has this number
    out_BSHW, _ = _in_groups(inputs, segments_BS, nowhere_B, start, chunk, group)
    return constrain(out_BSHW, "BSHW")


@jax.named_scope("gated_delta")
def extended_delta_rule(
    inputs: DeltaInputs, state_BHDW: jax.Array, real_BT: jax.Array, *, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Return the output for new tokens of each row, [B, T, H, W], and the state after them.

    Args:
        inputs: Queries, keys, values, decays and strengths of the new tokens.
        state_BHDW: The state before them, in float32.
        real_BT: Whether a token is real. Padding does not change the state.
        chunk: The number of tokens of a chunk, a power of two.
    """
    q, k, v, g, beta = inputs
    # Without decay and without a write, a token leaves the state unchanged.
    g, beta = (jnp.where(real_BT[:, :, None], x, jnp.zeros_like(x)) for x in (g, beta))
    inputs = DeltaInputs(q, k, v, g, beta)
    if real_BT.shape[1] == 1:
        return _one_token(inputs, state_BHDW)
    ones_BT = jnp.ones(real_BT.shape, jnp.int32)
    return _in_groups(inputs, ones_BT, ones_BT[:, 0], state_BHDW, chunk, 1)


def _one_token(inputs: DeltaInputs, state_BHDW: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output for one new token of each row, [B, 1, H, W], and the state after it."""
    q_BHD, k_BHD, v_BHW, g_BH, beta_BH = (x[:, 0] for x in _prepared(inputs))
    state_BHDW = state_BHDW * jnp.exp(g_BH)[..., None, None]
    change_BHW = beta_BH[..., None] * (v_BHW - jnp.einsum("BHD,BHDW->BHW", k_BHD, state_BHDW))
    state_BHDW = state_BHDW + k_BHD[..., None] * change_BHW[..., None, :]
    out_BHW = jnp.einsum("BHD,BHDW->BHW", q_BHD, state_BHDW)
    return out_BHW[:, None].astype(inputs.v_BSHW.dtype), state_BHDW


def _empty_state(inputs: DeltaInputs) -> jax.Array:
    B, _, H, W = inputs.v_BSHW.shape
    return constrain(jnp.zeros((B, H, inputs.k_BSKD.shape[-1], W), jnp.float32), "BHDW")


def _prepared(inputs: DeltaInputs) -> Sequence[jax.Array]:
    """Return the inputs in float32, with normalized queries and keys for each value head."""
    wide = DeltaInputs(*(x.astype(jnp.float32) for x in inputs))
    copies = wide.v_BSHW.shape[2] // wide.k_BSKD.shape[2]
    q, k = (jnp.repeat(_unit(x), copies, axis=2) for x in wide[:2])
    return (q * q.shape[-1] ** -0.5, k, *wide[2:])


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


# ---- Chunks ----


class _Group(NamedTuple):
    """The inputs of G chunks: one step of the scan, or all steps with a leading N."""

    inputs: DeltaInputs  # [B, G * C, ...]
    segments_BX: jax.Array  # [B, G * C]
    before_BG: jax.Array  # document of the last token before each chunk


def _in_groups(
    inputs: DeltaInputs, segments_BS: jax.Array, before_B: jax.Array, start_BHDW: jax.Array, chunk: int, group: int
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the last state, computed in groups of chunks.

    `before_B` is the document of the start state. Padding to complete groups changes neither result.
    """
    B, S = segments_BS.shape
    while chunk // 2 >= S:  # short sequences, such as those of tests
        chunk //= 2
    group = min(group, -(-S // chunk))
    padding = -S % (chunk * group)
    # Padding has no decay and no write, and continues the last document, so that the last state stays.
    inputs = DeltaInputs(*(jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) for x in inputs))
    segments_BS = jnp.pad(segments_BS, ((0, 0), (0, padding)), mode="edge")
    ends_BN = segments_BS[:, chunk - 1 :: chunk]
    before_BN = jnp.concatenate([before_B[:, None], ends_BN[:, :-1]], axis=1)

    def steps(x: jax.Array) -> jax.Array:
        """Return [B, N * X, ...] as [N, B, X, ...]."""
        count = (S + padding) // (chunk * group)
        return jnp.moveaxis(x.reshape(B, count, x.shape[1] // count, *x.shape[2:]), 1, 0)

    groups = jax.tree.map(steps, _Group(inputs, segments_BS, before_BN))
    out_NBXHW, last_BHDW = _scan(groups, start_BHDW, chunk)
    return jnp.moveaxis(out_NBXHW, 0, 1).reshape(B, S + padding, *out_NBXHW.shape[3:])[:, :S], last_BHDW


# The gradient is written by hand for two reasons. The backward pass of a plain scan would keep all intermediate values
# of all chunks. And the states get a name, so that a remat policy can keep them.
@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _scan(groups: _Group, start_BHDW: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Return the output of each group, [N, B, G * C, H, W], and the last state."""

    def step(state_BHDW: jax.Array, group: _Group) -> tuple[jax.Array, jax.Array]:
        return _one_group(state_BHDW, group, chunk)

    last_BHDW, out_NBXHW = jax.lax.scan(step, start_BHDW, groups)
    return out_NBXHW, last_BHDW


def _scan_forward(
    groups: _Group, start_BHDW: jax.Array, chunk: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[_Group, jax.Array]]:
    def step(state_BHDW: jax.Array, group: _Group) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        after_BHDW, out_BXHW = _one_group(state_BHDW, group, chunk)
        return after_BHDW, (out_BXHW, state_BHDW)

    last_BHDW, (out_NBXHW, states_NBHDW) = jax.lax.scan(step, start_BHDW, groups)
    out_NBXHW, states_NBHDW = (checkpoint_name(x, RESIDUAL) for x in (out_NBXHW, states_NBHDW))
    return (out_NBXHW, last_BHDW), (groups, states_NBHDW)


def _scan_backward(
    chunk: int, kept: tuple[_Group, jax.Array], slopes: tuple[jax.Array, jax.Array]
) -> tuple[_Group, jax.Array]:
    def step(slope_BHDW: jax.Array, group: tuple[_Group, jax.Array, jax.Array]) -> tuple[jax.Array, DeltaInputs]:
        (inputs, segments_BX, before_BG), state_BHDW, slope_BXHW = group
        _, pull = jax.vjp(
            lambda state, inputs: _one_group(state, _Group(inputs, segments_BX, before_BG), chunk), state_BHDW, inputs
        )
        before: tuple[jax.Array, DeltaInputs] = pull((slope_BHDW, slope_BXHW))
        return before

    groups, states_NBHDW = kept
    slope_NBXHW, slope_BHDW = slopes
    slope_BHDW, slope_inputs = jax.lax.scan(step, slope_BHDW, (groups, states_NBHDW, slope_NBXHW), reverse=True)
    # Segments are integers, and integers have no gradient.
    return _Group(slope_inputs, *(_no_slope(x) for x in groups[1:])), slope_BHDW


def _no_slope(x: jax.Array) -> jax.Array:
    return np.zeros(x.shape, jax.dtypes.float0)  # type: ignore[return-value]


_scan.defvjp(_scan_forward, _scan_backward)


def _one_group(state_BHDW: jax.Array, group: _Group, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Return the state after G chunks, and their output, [B, G * C, H, W]."""
    dtype = group.inputs.v_BSHW.dtype
    B, G = group.before_BG.shape

    def chunks(x: jax.Array) -> jax.Array:
        """Return [B, G * C, H, ...] as [B, G, H, C, ...]."""
        return jnp.moveaxis(x.reshape(B, G, chunk, *x.shape[2:]), 3, 2)

    q, k, v, g, beta = (chunks(x) for x in _prepared(group.inputs))
    segments_BGC = group.segments_BX.reshape(B, G, chunk)

    # Decays between two positions of one document. Masked exponents are -inf, because some of them would overflow.
    total = jnp.cumsum(g, axis=-1)  # [B, G, H, C]
    mask = _same(segments_BGC[..., :, None], segments_BGC[..., None, :]) & jnp.tri(chunk, dtype=bool)
    between = jnp.exp(jnp.where(mask, total[..., :, None] - total[..., None, :], -jnp.inf))
    from_start = jnp.exp(jnp.where(_same(segments_BGC, group.before_BG[..., None]), total, -jnp.inf))
    to_end = jnp.exp(jnp.where(_same(segments_BGC, segments_BGC[..., -1:]), total[..., -1:] - total, -jnp.inf))

    # Queries and keys are stacked, because both are multiplied by the keys and by the state: one product with 2 C rows
    # uses the matrix unit better than two.
    both = jnp.concatenate([q, k], axis=-2)
    products = jnp.einsum("bghxd,bghyd->bghxy", both, k)
    scores = products[..., :chunk, :] * between
    system = products[..., chunk:, :] * between * beta[..., None] * jnp.tri(chunk, k=-1)
    inverse = _inverse(system)
    from_state = both * jnp.concatenate([from_start, from_start], axis=-1)[..., None]
    k_end = k * to_end[..., None]

    outs = []
    for n in range(G):
        read = from_state[:, n] @ state_BHDW
        writes = inverse[:, n] @ (beta[:, n, ..., None] * (v[:, n] - read[..., chunk:, :]))
        outs.append(read[..., :chunk, :] + scores[:, n] @ writes)
        kept = from_start[:, n, :, -1, None, None]  # 0 if the document of the state ends in this chunk
        state_BHDW = constrain(kept * state_BHDW + jnp.swapaxes(k_end[:, n], -1, -2) @ writes, "BHDW")
    out = jnp.moveaxis(jnp.stack(outs, axis=1), 2, 3)  # [B, G, C, H, W]
    return state_BHDW, out.reshape(B, G * chunk, *out.shape[3:]).astype(dtype)


def _same(segments_BGX: jax.Array, others_BGX: jax.Array) -> jax.Array:
    """Return whether two segments are equal, with a dimension for the heads."""
    return (segments_BGX == others_BGX)[:, :, None]


@jax.custom_vjp
def _inverse(system: jax.Array) -> jax.Array:
    """Return the inverse of 1 + `system`, whose matrices are zero on and above the diagonal.

    Blocks on the diagonal are inverted in steps from 1 to C rows. In each step, two adjacent blocks become one, and the
    new part is -(second inverse) x (part of the system) x (first inverse). Unlike a power series, no term is larger
    than the inverses of blocks, and unlike a row-by-row solve, everything is a product of matrices.
    """
    length = system.shape[-1]
    numbers = jnp.arange(length)
    inverse, size = jnp.eye(length, dtype=system.dtype), 1
    while size < length:
        blocks, pairs = numbers // size, numbers // (2 * size)
        new = (pairs[:, None] == pairs[None, :]) & (blocks[:, None] != blocks[None, :])
        part = jnp.where(new, system, 0.0)
        inverse = inverse - (part if size == 1 else _precise(_precise(inverse, part), inverse))
        size *= 2
    return jnp.broadcast_to(inverse, system.shape)


def _precise(x: jax.Array, y: jax.Array) -> jax.Array:
    # TPUs multiply float32 in one pass of bfloat16 unless told otherwise. An inverse amplifies that rounding.
    return jnp.matmul(x, y, precision=PRECISION)


PRECISION = jax.lax.Precision.HIGH


def _inverse_forward(system: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(system)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-_precise(_precise(turned, slope), turned),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
