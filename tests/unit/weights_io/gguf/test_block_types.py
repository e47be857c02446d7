"""Q4_K and Q6_K: the bytes are decoded by the package gguf, and the errors are compared with derived ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.weights_io.gguf.block_types import quantize_q4_k, quantize_q6_k

gguf = pytest.importorskip("gguf")
QUANTIZERS: dict[str, Any] = {"Q4_K": quantize_q4_k, "Q6_K": quantize_q6_k}


def decoded(rows: np.ndarray, kind: str) -> np.ndarray:
    blocks = QUANTIZERS[kind](rows)
    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert blocks.shape == (len(rows), rows.shape[1] // size * block_bytes)
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize(("kind", "levels"), [("Q4_K", 15), ("Q6_K", 63)])
def test_uniform_weights_have_the_error_of_rounding(kind: str, levels: int) -> None:
    """Weights in [-a, a] have steps of 2a / levels: an RMS of step / sqrt(12), relative to a / sqrt(3)."""
    rows = np.random.default_rng(0).uniform(-0.02, 0.02, (40, 512)).astype(np.float32)
    error = decoded(rows, kind) - rows
    relative = np.sqrt((error**2).mean() / (rows**2).mean())
    assert 0.8 / levels < relative < 1.1 / levels
    assert np.abs(error).max() < 2.5 * 0.02 * 2 / levels


def test_more_blocks_than_a_chunk_keep_their_places() -> None:
    rows = np.random.default_rng(1).normal(0, 1, (2050, 256)).astype(np.float32) * np.arange(1, 2051)[:, None]
    for kind in QUANTIZERS:
        error = np.sqrt(((decoded(rows, kind) - rows) ** 2).mean(1)) / np.arange(1, 2051)
        assert error.max() < 0.12


def test_weights_on_the_grid_are_exact() -> None:
    random = np.random.default_rng(2)
    codes = random.integers(0, 16, (3, 8, 32)).astype(np.float32)
    codes[:, :, :2] = 0, 15  # each group uses its range
    scales = np.array([63, 1, 5, 17, 32, 40, 62, 33], np.float32)[None, :, None] * 2.0**-12
    rows = (codes * scales).reshape(3, 256).astype(np.float32)
    np.testing.assert_array_equal(decoded(rows, "Q4_K"), rows)
    shifted = ((codes - 7) * scales[:, :1]).reshape(3, 256).astype(np.float32)
    np.testing.assert_allclose(decoded(shifted, "Q4_K"), shifted, atol=7 * 2**-12 * 2**-10 * 63)
    symmetric = (random.integers(-32, 32, (2, 16, 16)) * 2.0**-10).astype(np.float32)
    symmetric[:, :, 0] = -32 * 2.0**-10
    rows = symmetric.reshape(2, 256)
    np.testing.assert_array_equal(decoded(rows, "Q6_K"), rows)


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_zeros_and_constants(kind: str) -> None:
    rows = np.zeros((2, 256), np.float32)
    rows[1] = -0.5
    found = decoded(rows, kind)
    assert not found[0].any()
    np.testing.assert_allclose(found[1], -0.5, rtol=2e-3)


def test_rows_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="256"):
        quantize_q4_k(np.zeros((1, 128), np.float32))
