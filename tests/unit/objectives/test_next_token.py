"""Losses and metrics of routers, worked out by hand for one layer and four experts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from forerun.nn.routing import Router, Routing, choose
from forerun.objectives.next_token import BALANCE, ENTROPY, LOAD, SQUARES, RouterLosses, router_values


def values(counts: list[float], probabilities: list[float], tokens: int) -> dict[str, float]:
    routing = Routing(
        counts_LX=jnp.array([counts]), probabilities_LX=jnp.array([probabilities]), squares_L=jnp.array([6.0])
    )
    return {name: float(value) for name, value in router_values(routing, jnp.array(tokens)).items()}


def test_equal_loads_give_the_number_of_experts_per_token() -> None:
    got = values([4.0] * 4, [2.0] * 4, tokens=8)  # two experts for each of eight tokens
    assert got[BALANCE] == pytest.approx(2.0)
    assert got[LOAD] == pytest.approx(1.0)
    assert got[ENTROPY] == pytest.approx(1.0)
    assert got[SQUARES] == pytest.approx(6.0 / 8)


def test_one_expert_with_all_tokens() -> None:
    got = values([8.0, 0.0, 0.0, 0.0], [8.0, 0.0, 0.0, 0.0], tokens=8)
    assert got[BALANCE] == pytest.approx(4.0)
    assert got[LOAD] == pytest.approx(4.0)
    assert got[ENTROPY] == pytest.approx(0.0)


def test_the_penalty_is_the_weighted_sum() -> None:
    names = {BALANCE: jnp.array(3.0), SQUARES: jnp.array(5.0)}
    assert float(RouterLosses(0.1, 0.01).penalty(names)) == pytest.approx(0.35)


def test_weights_of_the_chosen_experts_and_padding() -> None:
    logits = np.log(np.array([[[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.15, 0.05]]], np.float32))
    shares = choose(jnp.asarray(logits), Router(2, normalised=False), jnp.array([[True, False]]))
    np.testing.assert_array_equal(shares.ids_BSK, [[[3, 2], [0, 2]]])
    np.testing.assert_allclose(shares.weights_BSK, [[[0.4, 0.3], [0.7, 0.15]]], rtol=1e-6)
    np.testing.assert_allclose(
        choose(jnp.asarray(logits), Router(2), None).weights_BSK[0, 0], [4 / 7, 3 / 7], rtol=1e-6
    )
    assert shares.sums is not None
    np.testing.assert_allclose(shares.sums.counts_LX, [0, 0, 1, 1])  # padding does not count
    np.testing.assert_allclose(shares.sums.probabilities_LX, [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(shares.sums.squares_L, 0.0, atol=1e-10)
