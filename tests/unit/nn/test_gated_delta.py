"""The gated delta rule against the recurrence in float64, and against transformers document by document."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from forerun.config.schema import Remat
from forerun.nn import sharding
from forerun.nn.compute import Compute
from forerun.nn.gated_delta import DeltaInputs, extended_delta_rule, gated_delta_rule

ROWS, LENGTH, KEY_HEADS, HEADS, WIDTH, VALUES = 2, 70, 2, 4, 8, 6
DOCUMENTS = ((13, 40, 17), (70,))  # lengths in each row; 16 divides no border


def drawn(similar: float = 0.0) -> DeltaInputs:
    """Random inputs. With `similar` near 1, the keys are almost the same and hardly decay: the system is ill-scaled."""
    rng = np.random.default_rng(0)
    normal = partial(rng.normal, size=(ROWS, LENGTH, KEY_HEADS, WIDTH))
    k = (1 - similar) * normal() + similar * rng.normal(size=WIDTH) * 3
    v = rng.normal(size=(ROWS, LENGTH, HEADS, VALUES))
    g = -np.logaddexp(0, rng.normal(size=(ROWS, LENGTH, HEADS))) * (1 - similar)
    beta = 1 - (1 - similar) * rng.uniform(size=(ROWS, LENGTH, HEADS))
    return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in (normal(), k, v, g, beta)))


def segments() -> jax.Array:
    return jnp.asarray([np.repeat(np.arange(1, len(row) + 1), row) for row in DOCUMENTS], jnp.int32)


def recurrence(inputs: DeltaInputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs, token by token, and the states after the last token, in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in inputs)
    q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), HEADS // KEY_HEADS, axis=2) for x in (q, k))
    out, states = np.zeros(v.shape), np.zeros((ROWS, HEADS, WIDTH, VALUES))
    for b, lengths in enumerate(DOCUMENTS):
        starts = set(np.cumsum([0, *lengths]))
        for t, h in np.ndindex(LENGTH, HEADS):
            state = np.zeros((WIDTH, VALUES)) if t in starts else states[b, h] * np.exp(g[b, t, h])
            state = state + np.outer(k[b, t, h], beta[b, t, h] * (v[b, t, h] - k[b, t, h] @ state))
            states[b, h], out[b, t, h] = state, q[b, t, h] @ state / np.sqrt(WIDTH)
    return out, states


def slopes(inputs: DeltaInputs, compute: Compute | None = None) -> tuple[jax.Array, DeltaInputs]:
    """Return the output and the gradients under a fixed random cotangent."""
    pull = jnp.asarray(np.random.default_rng(9).normal(size=inputs.v_BSHW.shape), jnp.float32)
    rule = partial(gated_delta_rule, segments_BS=segments(), chunk=16, group=2)
    rule = compute.checkpointed(rule) if compute else rule

    def loss(inputs: DeltaInputs) -> tuple[jax.Array, jax.Array]:
        out = rule(inputs)
        return jnp.sum(out.astype(jnp.float32) * pull), out

    found, out = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    return out, found


def padded(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, count), *[(0, 0)] * (x.ndim - 2)], constant_values=7.0)


def assert_near(got: object, expected: object, tolerance: float) -> None:
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(have, np.float32), want, rtol=0, atol=tolerance * float(np.abs(want).max())
        )


@pytest.mark.parametrize(("chunk", "group"), [(16, 1), (16, 3), (64, 2), (256, 1)])
def test_chunks_are_the_recurrence(chunk: int, group: int) -> None:
    inputs = drawn()
    got = jax.jit(partial(gated_delta_rule, chunk=chunk, group=group))(inputs, segments())
    assert_near(got, recurrence(inputs)[0], 2e-6)


def test_similar_keys_without_decay_stay_exact() -> None:
    """A power series would add terms of alternating sign up to the binomial coefficients of 63."""
    inputs = drawn(similar=0.999)
    got = jax.jit(partial(gated_delta_rule, chunk=64, group=1))(inputs, segments())
    assert_near(got, recurrence(inputs)[0], 2e-4)


@pytest.mark.torch
def test_gradients_are_those_of_transformers_for_separate_documents() -> None:
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    inputs = drawn()
    leaves = [torch.tensor(np.asarray(x), requires_grad=True) for x in inputs]
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in leaves[:2])
    rows = []
    for b, lengths in enumerate(DOCUMENTS):
        borders = np.cumsum([0, *lengths])
        parts = [(slice(b, b + 1), slice(*pair)) for pair in pairwise(borders)]
        v, g, beta = leaves[2:]
        outs = [
            torch_chunk_gated_delta_rule(
                q[one], k[one], v[one], g=g[one], beta=beta[one], use_qk_l2norm_in_kernel=True
            )[0]
            for one in parts
        ]
        rows.append(torch.cat(outs, 1))
    expected = torch.cat(rows)
    (
        expected * torch.tensor(np.random.default_rng(9).normal(size=expected.shape), dtype=torch.float32)
    ).sum().backward()

    out, found = slopes(inputs)
    assert_near(out, expected.detach().numpy(), 2e-6)
    assert_near(found, [x.grad.numpy() for x in leaves], 1e-5)  # type: ignore[union-attr]


def test_a_mesh_and_remat_change_nothing() -> None:
    inputs = drawn()
    expected = slopes(inputs)
    named = Compute(remat=Remat(policy="named", keep=("attention_out",)))
    assert_near(slopes(inputs, named), expected, 1e-6)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(1, 2, 2), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        assert_near(slopes(inputs, Compute(remat=Remat(policy="full"))), expected, 1e-6)


def test_bfloat16_only_rounds_inputs_and_output() -> None:
    inputs = DeltaInputs(*(x.astype(jnp.bfloat16) for x in drawn()[:3]), *drawn()[3:])
    out, found = slopes(inputs)
    assert out.dtype == found.k_BSKD.dtype == jnp.bfloat16
    assert found.g_BSH.dtype == jnp.float32
    assert_near(out, recurrence(inputs)[0], 4e-3)


def test_the_backward_pass_keeps_one_state_per_group() -> None:
    """Only the inputs, the output and a state for each group may be kept: no values of a chunk."""
    inputs, where = drawn(), segments()

    def kept(group: int) -> int:
        _, pull = jax.vjp(lambda x: gated_delta_rule(x, where, chunk=4, group=group), inputs)
        return sum(leaf.size for leaf in jax.tree.leaves(pull) if hasattr(leaf, "size"))

    state = ROWS * HEADS * WIDTH * VALUES
    groups = [-(-LENGTH // 4), -(-LENGTH // 12)]
    padded = [n * 4 * g - LENGTH for n, g in zip(groups, (1, 3), strict=True)]
    per_token = sum(x[:, 0].size for x in inputs) + 2 * ROWS  # and segments, with one more for each chunk at most
    assert kept(1) - kept(3) >= (groups[0] - groups[1]) * state - abs(padded[1] - padded[0]) * per_token
    assert kept(1) <= groups[0] * state + (LENGTH + padded[0]) * per_token


def test_extension_in_pieces_is_the_complete_rule() -> None:
    """Rows of different lengths get padding at their end, then one token at a time."""
    inputs = drawn()
    expected, states = recurrence(inputs)
    pieces = ((0, 20), (20, 21), (21, 22), (22, 60), (60, 70))  # of the second row, which is one document
    extend = jax.jit(extended_delta_rule)
    state = jnp.zeros((ROWS, HEADS, WIDTH, VALUES))
    for start, end in pieces:
        padding = 3 if end - start > 1 else 0
        part = DeltaInputs(*(padded(x[:, start:end], padding) for x in inputs))
        real = jnp.broadcast_to(jnp.arange(end - start + padding) < end - start, (ROWS, end - start + padding))
        out, state = extend(part, state, real)
        assert_near(out[1:, : end - start], expected[1:, start:end], 5e-6)
    assert_near(state[1], states[1], 5e-6)
