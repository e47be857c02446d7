"""A table with new rows computes what the complete table computes, and has its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.nn import layers
from forerun.nn.weights import lowrank
from forerun.nn.weights.dense import Dense, Extended, as_weight, is_weight, mean_rows

V, N, E = 7, 2, 4
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(V, E)).astype(np.float32)
ROWS = RANDOM.normal(size=(N, E)).astype(np.float32)


def complete(first: int) -> np.ndarray:
    whole = np.zeros((max(V, first + N), E), np.float32)
    whole[:V] = TABLE
    whole[first : first + N] = ROWS
    return whole


@pytest.mark.parametrize("first", [7, 6, 4, 0])
def test_values_and_gradients_are_those_of_the_complete_table(first: int) -> None:
    whole = complete(first)
    tokens = jnp.asarray([[0, 3, len(whole) - 1, first], [first + 1, 1, 2, first]], jnp.int32)
    x = jnp.asarray(RANDOM.normal(size=(2, 4, E)), jnp.float32)

    def loss(table: object) -> jax.Array:
        embedded = layers.embed(table, tokens, jnp.float32)  # type: ignore[arg-type]
        logits = jnp.einsum("BSE,VE->BSV", x + embedded, as_weight(table).matrix("VE", jnp.float32))
        return jax.nn.logsumexp(logits, axis=-1).sum()

    def of_rows(rows: jax.Array) -> jax.Array:
        return loss(Extended(base=jnp.asarray(TABLE), rows=rows, first=first, is_embedding=True))

    value, gradient = jax.value_and_grad(of_rows)(jnp.asarray(ROWS))
    expected, expected_gradient = jax.value_and_grad(loss)(jnp.asarray(whole))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient[first : first + N], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [7, 4])
def test_the_plain_form_is_the_complete_table(first: int) -> None:
    def leaf(is_embedding: bool) -> Extended[jax.Array]:
        return Extended(
            base=jnp.asarray(TABLE, jnp.bfloat16), rows=jnp.asarray(ROWS), first=first, is_embedding=is_embedding
        )

    params = {"embed": leaf(True), "head": leaf(False)}
    assert is_weight(params["embed"])
    expected = complete(first)
    keep = np.ones(len(expected), bool)
    keep[first : first + N] = False
    expected[keep] = np.asarray(jnp.asarray(TABLE, jnp.bfloat16).astype(jnp.float32))[keep[:V]]
    for made in (lowrank.plain(params, jnp.float32), lowrank.bare(params)):
        assert isinstance(made["head"], Dense)
        np.testing.assert_array_equal(made["embed"], expected)
        np.testing.assert_array_equal(made["head"].value, expected)


def test_new_rows_are_the_mean() -> None:
    rows = mean_rows(jnp.asarray(TABLE), 3, jnp.float32)
    np.testing.assert_allclose(rows, np.broadcast_to(TABLE.astype(np.float64).mean(0), (3, E)), rtol=1e-5, atol=1e-7)
