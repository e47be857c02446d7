"""Products of groups of rows against a loop in numpy, with an empty group and sizes that fill no tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from forerun.nn.weights.experts import grouped_matmul

SIZES = np.array([3, 0, 140, 7], np.int32)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SIZES.sum(), 16)).astype(np.float32)
WEIGHT = RNG.normal(size=(4, 16, 24)).astype(np.float32)
GRADIENT = RNG.normal(size=(SIZES.sum(), 24)).astype(np.float32)
PARTS = np.split(np.arange(len(X)), np.cumsum(SIZES)[:-1])
OUTER = np.stack([X[rows].T @ GRADIENT[rows] for rows in PARTS])


def test_the_product_and_its_gradients() -> None:
    y, back = jax.vjp(lambda x, weight: grouped_matmul(x, weight, jnp.asarray(SIZES)), X, WEIGHT)
    x_gradient, weight_gradient = back(GRADIENT)
    expected = np.concatenate([X[rows] @ one for rows, one in zip(PARTS, WEIGHT, strict=True)])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    expected = np.concatenate([GRADIENT[rows] @ one.T for rows, one in zip(PARTS, WEIGHT, strict=True)])
    np.testing.assert_allclose(x_gradient, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weight_gradient, OUTER, rtol=1e-5, atol=1e-5)
