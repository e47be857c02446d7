"""The router and the MLP of experts, against a sum over all experts that masks the others."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.hardware.mesh import MeshShape
from forerun.nn.routing import Choice, Router, by_expert, choose, combined, dispatched, expert_mlp
from forerun.nn.weights.experts import Experts
from forerun.program.build import make_mesh

ROWS, LENGTH, EMBED, EXPERTS, TOP, WIDTH = 2, 12, 16, 6, 2, 24


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def test_values_and_gradients() -> None:
    """Gradients of the tokens, the weights of the router and all matrices. One expert has no token."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (ROWS, LENGTH, EMBED))
    logits = jax.random.normal(keys[1], (ROWS, LENGTH, EXPERTS)).at[..., 4].set(-100.0)
    shapes = ((EXPERTS, EMBED, WIDTH), (EXPERTS, EMBED, WIDTH), (EXPERTS, WIDTH, EMBED))
    matrices = tuple(jax.random.normal(key, shape) / 4 for key, shape in zip(keys[2:], shapes, strict=True))
    ids = choose(logits, Router(TOP), None).ids_BSK
    factors = choose(logits, Router(TOP), None).weights_BSK
    pull = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def grouped(x: jax.Array, factors: jax.Array, matrices: tuple[jax.Array, ...]) -> jax.Array:
        gate, up, down = (Experts(value=one, share=TOP / EXPERTS) for one in matrices)
        return expert_mlp(x, Choice(ids, factors, None), (gate, up, down), EXPERTS, activation)

    def plain(x: jax.Array, factors: jax.Array, matrices: tuple[jax.Array, ...]) -> jax.Array:
        y = jnp.zeros_like(x)
        for expert, (gate, up, down) in enumerate(zip(*matrices, strict=True)):
            share = jnp.sum(jnp.where(ids == expert, factors, 0.0), axis=-1, keepdims=True)
            y = y + share * (activation(x @ gate, x @ up) @ down)
        return y

    with jax.default_matmul_precision("highest"):
        got, back = jax.vjp(grouped, x, factors, matrices)
        wanted, wanted_back = jax.vjp(plain, x, factors, matrices)
        np.testing.assert_allclose(got, wanted, atol=1e-5)
        for have, want in zip(jax.tree.leaves(back(pull)), jax.tree.leaves(wanted_back(pull)), strict=True):
            np.testing.assert_allclose(have, want, atol=2e-5)
    assert not np.asarray(back(pull)[2][0][4]).any()


def test_dispatched_and_combined_are_transposed() -> None:
    ids = jnp.asarray([[3, 0], [0, 1], [2, 3], [1, 0]])
    order, inverse, sizes = by_expert(ids.reshape(-1), 4)
    np.testing.assert_array_equal(sizes, [3, 2, 1, 2])
    x, y = jnp.arange(20.0).reshape(4, 5), jnp.cos(jnp.arange(40.0)).reshape(8, 5)
    tokens = np.repeat(np.arange(4), 2)[np.asarray(order)]
    np.testing.assert_array_equal(dispatched(2, x, order, inverse), np.asarray(x)[tokens])
    wanted = np.zeros((4, 5), np.float32)
    np.add.at(wanted, tokens, np.asarray(y))
    np.testing.assert_allclose(combined(2, y, order, inverse), wanted, atol=1e-6)
    np.testing.assert_allclose(
        jnp.vdot(dispatched(2, x, order, inverse), y), jnp.vdot(x, combined(2, y, order, inverse)), rtol=1e-5
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_biases_of_experts(tp: int) -> None:
    """With tp, the devices add their parts of the output, and the bias must count once."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, LENGTH, EMBED))
    ids = np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(ROWS * LENGTH)]).reshape(ROWS, LENGTH, TOP)
    factors = rng.uniform(0.1, 1.0, ids.shape)
    gate, up, down = (
        rng.normal(size=(EXPERTS, *shape)) / 4 for shape in ((EMBED, WIDTH), (EMBED, WIDTH), (WIDTH, EMBED))
    )
    gate_bias, up_bias, down_bias = (rng.normal(size=(EXPERTS, width)) for width in (WIDTH, WIDTH, EMBED))
    expected = np.zeros(x.shape)
    for row, position, choice in np.ndindex(ids.shape):
        expert, token = ids[row, position, choice], x[row, position]
        gated, raised = token @ gate[expert] + gate_bias[expert], token @ up[expert] + up_bias[expert]
        output = (gated / (1 + np.exp(-gated)) * raised) @ down[expert] + down_bias[expert]
        expected[row, position] += factors[row, position, choice] * output

    @jax.jit
    def computed(x: jax.Array, factors: jax.Array, matrices: list[jax.Array], biases: list[jax.Array]) -> jax.Array:
        weights = tuple(Experts(value=matrix, share=TOP / EXPERTS) for matrix in matrices)
        choice = Choice(jnp.asarray(ids, jnp.int32), factors, None)
        return expert_mlp(x, choice, weights, EXPERTS, activation, tuple(biases))  # type: ignore[arg-type]

    arrays = jax.tree.map(
        lambda array: jnp.asarray(array, jnp.float32), (x, factors, [gate, up, down], [gate_bias, up_bias, down_bias])
    )
    mesh = jax.set_mesh(make_mesh(MeshShape(1, 1, tp), jax.devices()[:tp])) if tp > 1 else nullcontext()
    with mesh, jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(computed(*arrays), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_choice_with_a_correction(sigmoid: bool) -> None:
    """The correction decides which experts are chosen, and not their weights. Sums skip tokens that do not count."""
    rng = np.random.default_rng(1)
    logits, correction = rng.normal(size=(ROWS, LENGTH, EXPERTS)), np.linspace(0.5, -0.5, EXPERTS)
    scale, counted = rng.uniform(0.5, 2.0, EXPERTS), rng.random((ROWS, LENGTH)) < 0.5
    router = Router(TOP, True, sigmoid, jnp.asarray(correction, jnp.float32), jnp.asarray(scale, jnp.float32))
    choice = choose(jnp.asarray(logits, jnp.float32), router, jnp.asarray(counted))

    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else shares
    ids = np.argsort(-(scores + correction), axis=-1)[..., :TOP]
    assert (ids != np.argsort(-scores, axis=-1)[..., :TOP]).any(), "a correction without an effect would be no test"
    weights = np.take_along_axis(scores, ids, -1)
    np.testing.assert_array_equal(choice.ids_BSK, ids)
    np.testing.assert_allclose(choice.weights_BSK, weights / weights.sum(-1, keepdims=True) * scale[ids], rtol=1e-5)
    assert choice.sums is not None
    np.testing.assert_array_equal(choice.sums.counts_LX, np.bincount(ids[counted].ravel(), minlength=EXPERTS))
    np.testing.assert_allclose(choice.sums.probabilities_LX, shares[counted].sum(0), rtol=1e-5)
    normalizers = np.log(np.exp(logits[counted]).sum(-1))
    np.testing.assert_allclose(choice.sums.squares_L, (normalizers**2).sum(), rtol=1e-5)
