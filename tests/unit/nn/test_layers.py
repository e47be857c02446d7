from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import RopeScaling
from forerun.nn.layers import rms_norm
from forerun.nn.rope import Rope, angles, frequencies, rotate


def test_rms_norm_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    x, scale = 3 * rng.normal(size=(2, 5, 16)), rng.normal(size=16)
    expected = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-2) * scale
    got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 1e-2)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bfloat16_adds_up_in_float32() -> None:
    """4096 ones and a large entry: a bfloat16 sum of squares would stop growing at 256."""
    x = jnp.ones((1, 4096), jnp.bfloat16)
    got = rms_norm(x, jnp.full(4096, 2.0), 0.0)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(jnp.float32), np.full((1, 4096), 2.0))


def turns(rope: Rope, positions: Any) -> Any:
    where = jnp.asarray(positions, jnp.int32)
    return angles(rope, where, jnp.ones_like(where))


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_rope_is_a_complex_rotation(theta: float) -> None:
    """Pairs (i, i + D/2) as complex numbers, turned by position x theta^(-2i/D), in float64."""
    D, rng = 16, np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 3, D))
    positions = np.stack([np.arange(6), 3000 + np.arange(6)])
    turn = np.exp(1j * positions[..., None, None] * theta ** (-2 * np.arange(D // 2) / D))
    turned = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turn
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    got = rotate(jnp.asarray(x, jnp.float32), turns(Rope(theta, D), positions))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)
    np.testing.assert_allclose(got[:1], expected[:1], rtol=0, atol=1e-5)


def test_interleaved_rope_is_a_complex_rotation_of_neighbours() -> None:
    """Pairs (2i, 2i + 1) of the first 8 of 12 dimensions as complex numbers, in float64. The other 4 stay."""
    D, dims, rng = 12, 8, np.random.default_rng(0)
    x = rng.normal(size=(1, 6, 3, D))
    turn = np.exp(1j * np.arange(6)[:, None, None] * 1e4 ** (-2 * np.arange(dims // 2) / dims))
    turned = (x[..., 0:dims:2] + 1j * x[..., 1:dims:2]) * turn
    expected = x.copy()
    expected[..., 0:dims:2], expected[..., 1:dims:2] = turned.real, turned.imag
    got = rotate(jnp.asarray(x, jnp.float32), turns(Rope(1e4, dims, interleaved=True), [np.arange(6)]))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_rope_scores_depend_on_distance_only() -> None:
    rope = Rope(1e4, 32, RopeScaling(original=64))
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 32))

    def score(at: int, of: int) -> float:
        turned = [rotate(x, turns(rope, [[p]])) for x, p in ((q, at), (k, of))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_llama3_scaling_by_wavelength() -> None:
    """The published rule, case by case: short waves stay, long ones are slowed by the factor, a line in between."""
    scaling = RopeScaling(factor=8.0, low=1.0, high=4.0, original=8192)
    got = np.asarray(frequencies(Rope(5e5, 128, scaling)), np.float64)
    kinds = set()
    for i, value in enumerate(got):
        frequency = 5e5 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            kind, expected = "kept", frequency
        elif wavelength > 8192 / 1:
            kind, expected = "slowed", frequency / 8
        else:
            kind, smooth = "between", (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        kinds.add(kind)
        assert value == pytest.approx(expected, rel=1e-5), (i, kind)
    assert kinds == {"kept", "slowed", "between"}


def test_positions_stay_exact_in_bfloat16_models() -> None:
    """Neighbours at 4096 differ: in bfloat16 they would be one position."""
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    cos, sin = turns(Rope(1e4, 8), [[4096, 4097]])
    assert cos.dtype == jnp.float32
    turned = rotate(x, (cos, sin))
    assert turned.dtype == jnp.bfloat16
    assert not np.array_equal(turned[0, 0].astype(jnp.float32), turned[0, 1].astype(jnp.float32))
