"""The short convolution against a sum over inputs in float64, and against torch document by document."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.nn.short_convolution import extended_convolution, real_tokens, short_convolution

DOCUMENTS = ((5, 2, 1, 9), (17,))  # lengths in each row; some are shorter than the width
LENGTH, WIDTH = 17, 4


def drawn() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs with two dimensions of channels, weights, bias and segments."""
    rng = np.random.default_rng(0)
    shapes = (2, LENGTH, 3, 2), (3, 2, WIDTH)
    segments = [np.repeat(np.arange(1, len(row) + 1), row) for row in DOCUMENTS]
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return x, weight, jnp.asarray(np.stack(segments), jnp.int32)


def plain(x: object, weight: object) -> np.ndarray:
    """Return the sum of the inputs of the same document, position by position."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out = np.zeros(x.shape)
    for b, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            for t in range(start, start + length):
                for back in range(min(WIDTH, t - start + 1)):
                    out[b, t] += x[b, t - back] * weight[..., WIDTH - 1 - back]
            start += length
    return out


def test_inputs_of_other_documents_are_zero() -> None:
    x, weight, segments = drawn()
    np.testing.assert_allclose(short_convolution(x, weight, segments), plain(x, weight), atol=1e-6)
    got = short_convolution(x, weight, segments, activation=jax.nn.silu)
    expected = plain(x, weight)
    np.testing.assert_allclose(got, expected / (1 + np.exp(-expected)), atol=1e-6)


@pytest.mark.torch
def test_gradients_are_those_of_torch() -> None:
    import torch

    x, weight, segments = drawn()
    leaves = [torch.tensor(np.asarray(one), requires_grad=True) for one in (x, weight)]
    flat, kernel = leaves[0].reshape(2, LENGTH, 6).transpose(1, 2), leaves[1].reshape(6, 1, WIDTH)
    total = torch.zeros(())
    for b, lengths in enumerate(DOCUMENTS):
        for part in torch.split(flat[b : b + 1], list(lengths), dim=2):
            y = torch.nn.functional.conv1d(part, kernel, padding=WIDTH - 1, groups=6)
            total = total + torch.nn.functional.silu(y[..., : part.shape[-1]]).square().sum()
    total.backward()

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = short_convolution(x, weight, segments, activation=jax.nn.silu)
        return jnp.sum(jnp.square(y))

    for got, leaf in zip(jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight), leaves, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_extension_in_pieces_is_the_complete_convolution() -> None:
    x, weight, _ = drawn()
    x = x[1:]
    expected = short_convolution(x, weight, jnp.ones((1, LENGTH), jnp.int32))
    old = jnp.zeros((1, WIDTH - 1, 3, 2))
    for start, end, padding in ((0, 1, 3), (1, 3, 0), (3, 4, 0), (4, 12, 2), (12, 17, 0)):
        part = jnp.pad(x[:, start:end], ((0, 0), (0, padding), (0, 0), (0, 0)), constant_values=9.0)
        positions = jnp.minimum(jnp.arange(start, end + padding), end - 1)[None]
        got, old = extended_convolution(part, weight, old, real_tokens(positions))
        np.testing.assert_allclose(got[:, : end - start], expected[:, start:end], atol=1e-6)
    np.testing.assert_array_equal(old, x[:, -(WIDTH - 1) :])


def test_real_tokens_are_those_with_a_new_position() -> None:
    positions = jnp.asarray([[3, 4, 4, 4], [3, 3, 3, 3], [3, 4, 5, 6]])
    assert real_tokens(positions).tolist() == [[True, True, False, False], [True, False, False, False], [True] * 4]


def test_bfloat16_sums_in_float32() -> None:
    x, weight, segments = drawn()
    got = short_convolution(x.astype(jnp.bfloat16), weight, segments)
    assert got.dtype == jnp.bfloat16
    expected = plain(x.astype(jnp.bfloat16).astype(jnp.float32), weight)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.01, atol=0.01)
