"""Numbers that are integers times scales give these integers and scales again, however they are held."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.nn.weights.fakequant import FakeQuantized, limits

INPUTS, OUTPUTS = 64, 400


def drawn(bits: int, group: int | None, *, full: bool) -> tuple[np.ndarray, jax.Array]:
    """Codes, and scales that are bfloat16 numbers with all kinds of mantissas. With `full`, every group has a code at
    the end of the range, as groups with computed scales have: the lowest, the largest or the largest but negative."""
    rng = np.random.default_rng(bits)
    low, high = limits(bits)
    codes = rng.integers(-high + 1, high, (INPUTS, OUTPUTS))
    if full:
        numbers = group or INPUTS
        for start in range(0, INPUTS, numbers):
            for end in (low, high, -high):
                columns = (
                    rng.random(OUTPUTS) < 0.5 if end != -high else np.abs(codes[start : start + numbers]).max(0) < high
                )
                codes[start + rng.integers(0, numbers, OUTPUTS)[columns], np.flatnonzero(columns)] = end
    scales = np.exp(rng.uniform(-9, 0, (INPUTS // (group or INPUTS), OUTPUTS)))
    return codes.astype(np.int8), jnp.asarray(scales, jnp.bfloat16)


def weight(codes: np.ndarray, scales: jax.Array, bits: int, group: int | None, dtype: str) -> FakeQuantized[jax.Array]:
    exact = codes.astype(np.float32) * np.repeat(np.asarray(scales.astype(jnp.float32)), group or INPUTS, axis=0)
    value = jnp.asarray(exact).astype(dtype)
    return FakeQuantized(value=value, scale=scales, inputs=1, outputs=1, bits=bits, group=group)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, None), (8, 16), (8, None)])
def test_given_scales_give_the_codes_back(bits: int, group: int | None, dtype: str) -> None:
    codes, scales = drawn(bits, group, full=False)
    got = jax.jit(lambda one: one.codes())(weight(codes, scales, bits, group, dtype))
    np.testing.assert_array_equal(got[0], codes)
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(scales))


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, None), (8, 16), (8, None)])
def test_scales_can_be_computed_again(bits: int, group: int | None) -> None:
    codes, scales = drawn(bits, group, full=True)
    before = weight(codes, scales, bits, group, "float32")
    after = jax.jit(lambda one: one.computed())(before)
    assert after.scale is None
    got = jax.jit(lambda one: one.codes())(after)
    np.testing.assert_array_equal(got[0], codes)
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(scales))
    moved = np.abs(np.asarray(after.value - before.value)) / np.repeat(
        np.asarray(scales.astype(np.float32)), group or INPUTS, axis=0
    )
    assert moved.max() <= 0.5, "no number leaves the codes that are nearest"
    plain = FakeQuantized(value=before.value, inputs=1, outputs=1, bits=bits, group=group)
    assert np.mean(np.asarray(plain.codes()[1]) != np.asarray(scales)) > 0.5, "without it, scales would change"
