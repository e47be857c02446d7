from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.generate.sampling import NOT_A_NUMBER, Rule, Sampling, choose, narrowed

DRAWS = 20_000


def allowed(logits: NDArray[np.float64], top_k: int | None, top_p: float | None) -> NDArray[np.float64]:
    """Probabilities by the definition, one row: the k likeliest, of these the fewest that reach p together."""
    order = np.argsort(-logits, kind="stable")
    if top_k is not None:
        order = order[:top_k]
    shares = np.exp(logits[order] - logits[order].max())
    shares /= shares.sum()
    if top_p is not None:
        count, reached = 0, 0.0
        while reached < top_p and count < len(shares):
            reached += shares[count]
            count += 1
        order, shares = order[:count], shares[:count] / shares[:count].sum()
    out = np.zeros_like(logits)
    out[order] = shares
    return out


CASES = [(None, None), (1, None), (5, None), (500, None), (None, 0.1), (None, 0.5), (None, 0.95), (7, 0.6), (3, 0.999)]


@pytest.mark.parametrize(("top_k", "top_p"), CASES)
def test_the_tokens_left_and_their_probabilities(top_k: int | None, top_p: float | None) -> None:
    logits = np.random.default_rng(1).normal(0, 2, (6, 50)).astype(np.float32)
    left = narrowed(jnp.asarray(logits), Rule(False, top_k, top_p))
    expected = np.stack([allowed(row.astype(np.float64), top_k, top_p) for row in logits])
    np.testing.assert_array_equal(np.isfinite(left), expected > 0)
    np.testing.assert_allclose(jax.nn.softmax(left, axis=-1), expected, atol=1e-6)


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.5), Sampling(1.7, top_k=4), Sampling(0.8, top_p=0.7)], ids=str
)
def test_tokens_come_as_often_as_their_probability_says(sampling: Sampling) -> None:
    logits = np.random.default_rng(2).normal(0, 1.5, 12).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    rows = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, 12))
    chosen = np.asarray(choose(rows, keys, jnp.float32(sampling.temperature), sampling.rule, 12))
    expected = allowed(logits.astype(np.float64) / sampling.temperature, sampling.top_k, sampling.top_p)
    counts = np.bincount(chosen, minlength=12)
    assert not counts[expected == 0].any()
    # Five standard deviations, each token for itself; and chi-square against its 99.99 % point for <= 11 degrees.
    spread = np.sqrt(DRAWS * expected * (1 - expected))
    assert (np.abs(counts - DRAWS * expected) <= 5 * spread + 1).all()
    kept = expected > 0
    assert ((counts[kept] - DRAWS * expected[kept]) ** 2 / (DRAWS * expected[kept])).sum() < 38


def test_temperature_zero_takes_the_likeliest_and_a_cold_one_nearly_so() -> None:
    logits = jnp.asarray(np.random.default_rng(3).normal(0, 1, (8, 30)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 8)
    likeliest = np.asarray(logits).argmax(-1)
    np.testing.assert_array_equal(choose(logits, keys, jnp.float32(1), Sampling(0).rule, 30), likeliest)
    np.testing.assert_array_equal(choose(logits, keys, jnp.float32(1e-30), Sampling(1e-30).rule, 30), likeliest)


@pytest.mark.parametrize(
    "sampling", [Sampling(0), Sampling(3.0), Sampling(3.0, top_k=25), Sampling(3.0, top_p=0.99)], ids=str
)
def test_ids_beyond_the_vocabulary_are_never_chosen(sampling: Sampling) -> None:
    logits = jnp.broadcast_to(jnp.where(jnp.arange(30) < 20, 0.0, 50.0), (2000, 30))
    keys = jax.random.split(jax.random.key(5), 2000)
    chosen = choose(logits, keys, jnp.float32(sampling.temperature or 1), sampling.rule, 20)
    assert int(chosen.max()) < 20
    assert int(chosen.min()) >= 0


def test_equal_logits_stay_together() -> None:
    left = narrowed(jnp.asarray([[1.0, 3.0, 1.0, 0.0]]), Rule(False, top_k=2))
    assert np.isfinite(left).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_a_number_is_not_a_token(wrong: float, temperature: float) -> None:
    logits = jnp.asarray([[1.0, wrong, 0.0], [1.0, 2.0, 0.0]])
    chosen = choose(logits, jax.random.split(jax.random.key(0), 2), jnp.float32(1), Sampling(temperature).rule, 3)
    assert int(chosen[0]) == NOT_A_NUMBER
    assert int(chosen[1]) != NOT_A_NUMBER


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
    ],
    ids=str,
)
def test_settings_without_a_meaning(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_a_cpu_does_not_sort_the_vocabulary_for_top_k() -> None:
    def chosen(logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
        return choose(logits_BV, keys_B, jnp.float32(0.8), Rule(False, top_k=4), 256)

    program = jax.jit(chosen).lower(jnp.zeros((2, 256)), jax.random.split(jax.random.key(0), 2)).compile().as_text()
    assert 'custom_call_target="TopK"' in program
    assert " sort(" not in program
