"""Attention on a split sequence against a softmax over the complete sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.hardware.mesh import MeshShape
from forerun.nn.attention import Kernel
from forerun.nn.context import SequenceSplit, split_attention
from forerun.program.build import make_mesh

LENGTH, HEADS, KV_HEADS, DIMS = 48, 4, 2, 8


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray, window: int | None) -> np.ndarray:
    """Compute one query of one head at a time."""
    out = np.zeros(q.shape)
    for row, position, head in np.ndindex(q.shape[:3]):
        oldest = 0 if window is None else max(0, position + 1 - window)
        visible = [n for n in range(oldest, position + 1) if segments[row, n] == segments[row, position]]
        keys, values = (x[row, visible, head * KV_HEADS // HEADS] for x in (k, v))
        weights = np.exp(keys @ q[row, position, head] / np.sqrt(DIMS))
        out[row, position, head] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 7, 20, LENGTH])
@pytest.mark.parametrize("block", [2, 512])
def test_every_query_sees_its_window(window: int | None, block: int) -> None:
    """One row is one document, and the other one has three. A device has two chunks of six positions."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, LENGTH, heads, DIMS)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    segments = np.stack([np.ones(LENGTH, np.int32), np.repeat([1, 2, 3], [5, 30, 13])])
    split = SequenceSplit(4)

    @jax.jit
    def attend(*arrays: jax.Array) -> jax.Array:
        spread = [split.spread(x) for x in arrays]
        return split.in_text_order(split_attention(*spread, window=window, kernel=Kernel("xla", block), split=split))

    with jax.set_mesh(make_mesh(MeshShape(1, 1, 1, context=4), jax.devices()[:4])):
        output = attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(segments))
    np.testing.assert_allclose(output, expected(q, k, v, segments, window), rtol=0, atol=1e-5)
