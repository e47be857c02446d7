"""The MLP of experts on one device, against a sum over all experts that masks the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from forerun.nn.routing import Choice, Router, by_expert, choose, combined, dispatched, expert_mlp
from forerun.nn.weights.experts import Experts

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
