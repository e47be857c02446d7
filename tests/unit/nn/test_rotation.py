"""Rotations of queries and keys, against complex numbers in float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.nn.rope import Rope, angles, frequencies, rotate

HEAD, LENGTH, HEADS = 16, 12, 3
HALVES = Rope(100.0, HEAD)
POSITIONS = np.tile(np.arange(LENGTH) * 7, (2, 1))


def rotated(rope: Rope, x_BSHD: np.ndarray, sign: int) -> np.ndarray:
    """Return the rotation of the first dimensions by multiplication with complex numbers."""
    turning, rest = np.split(x_BSHD.astype(np.float64), [rope.dims], axis=-1)
    if rope.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = np.split(turning, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(sign * 1j * POSITIONS[..., None, None] * frequencies(rope))
    parts = (turned.real, turned.imag)
    made = np.stack(parts, axis=-1).reshape(turning.shape) if rope.interleaved else np.concatenate(parts, axis=-1)
    return np.concatenate((made, rest), axis=-1)


@pytest.mark.parametrize("by_product", [False, True], ids=["slices", "product"])
@pytest.mark.parametrize(
    "rope",
    [HALVES, replace(HALVES, dims=8), replace(HALVES, interleaved=True)],
    ids=["halves", "partial", "neighbours"],
)
def test_rotation_and_its_gradient(rope: Rope, by_product: bool) -> None:
    """The gradient of a rotation is the rotation by the opposite angle."""
    draw = np.random.default_rng(0)
    x, cotangent = (draw.normal(size=(2, LENGTH, HEADS, HEAD)).astype(np.float32) for _ in range(2))
    turns = angles(rope, jnp.asarray(POSITIONS), jnp.ones_like(POSITIONS), by_product=by_product)
    made, back = jax.vjp(lambda x: rotate(x, turns), jnp.asarray(x))
    np.testing.assert_allclose(made, rotated(rope, x, 1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(back(jnp.asarray(cotangent))[0], rotated(rope, cotangent, -1), rtol=0, atol=2e-5)


def test_the_product_gives_the_values_of_the_slices_in_bfloat16() -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, LENGTH, HEADS, HEAD)), jnp.bfloat16)
    found = [
        rotate(x, angles(HALVES, jnp.asarray(POSITIONS), jnp.ones_like(POSITIONS), by_product=way))
        for way in (False, True)
    ]
    np.testing.assert_array_equal(*(np.asarray(one.astype(jnp.float32)) for one in found))
