"""Attention on a split sequence against a softmax over the complete sequence.

Splash attention of two devices of a context axis against attention to the complete sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.hardware.mesh import MeshShape
from forerun.nn.attention import Kernel, Scores, attention
from forerun.nn.context import BlockTable, SequenceSplit, split_attention, split_splash
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


DEVICES, SPLASH_LENGTH, BLOCK = 2, 1024, 128


@dataclass(frozen=True)
class OneDevice(SequenceSplit):
    """The split as one device sees it, without a mesh."""

    device: Any = 0

    def starts(self, length: int) -> tuple[Any, Any]:
        return self.device * length, (2 * self.devices - 1 - self.device) * length


def own_positions(device: int, length: int) -> np.ndarray:
    """The positions of device 0 are those of chunks 0 and 3, and those of device 1 of chunks 1 and 2."""
    return np.concatenate([np.split(np.arange(length), 4)[chunk] for chunk in ((0, 3), (1, 2))[device]])


@pytest.mark.parametrize(
    ("length", "window", "softcap", "fused"),
    [(512, None, None, False), (SPLASH_LENGTH, 200, 20.0, False), (512, None, None, True)],
    ids=["causal", "window", "fused"],
)
def test_two_devices_are_one(length: int, window: int | None, softcap: float | None, fused: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v, pull = (jnp.asarray(rng.normal(size=(1, length, heads, 64)), jnp.float32) for heads in (4, 2, 2, 4))
    segments = jnp.asarray(np.where(np.arange(length) < 200, 1, 2)[None], jnp.int32)

    def expected(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(q, k, v, segments, window=window, kernel=Kernel("xla"), softcap=softcap)
        return jnp.sum(out * pull), out

    @jax.jit
    def of_device(device: jax.Array, places: jax.Array) -> Any:
        local = partial(
            split_splash,
            scores=Scores(64**-0.5, softcap, window),
            kernel=Kernel("splash", BLOCK, fused),
            split=OneDevice(DEVICES, device),
            interpret=True,
        )

        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = local(q[:, places], k, v, segments[:, places], segments)
            return jnp.sum(out * pull[:, places]), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    (_, out), wanted = jax.jit(jax.value_and_grad(expected, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    total = jax.tree.map(jnp.zeros_like, wanted)
    for device in range(DEVICES):
        places = own_positions(device, length)
        (_, found), gradients = of_device(jnp.int32(device), jnp.asarray(places))
        np.testing.assert_allclose(found, out[:, places], rtol=0, atol=2e-5)
        total = jax.tree.map(jnp.add, total, gradients)
    for have, want in zip(total, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=2e-5 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300, 5000], ids=str)
def test_tables_visit_exactly_the_blocks_with_visible_scores(window: int | None) -> None:
    table, keys = BlockTable(BLOCK, SPLASH_LENGTH // BLOCK, window), SPLASH_LENGTH // BLOCK
    for device in range(DEVICES):
        places = own_positions(device, SPLASH_LENGTH)
        behind = places[:, None] - np.arange(SPLASH_LENGTH)
        seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        blocks = seen.reshape(-1, BLOCK, keys, BLOCK).any(axis=(1, 3))
        starts = jnp.asarray(places[::BLOCK])
        rows = [np.asarray(x) for x in table.of_queries(starts)]
        columns = [np.asarray(x) for x in table.of_keys(starts, compact=True)]
        complete = [np.asarray(x) for x in table.of_keys(starts, compact=False)]
        for n, row in enumerate(blocks):
            assert rows[0][n][rows[1][n] == 1].tolist() == np.flatnonzero(row).tolist()
        for n, column in enumerate(blocks.T):
            assert columns[0][:, n][columns[1][:, n] == 1].tolist() == np.flatnonzero(column).tolist()
        np.testing.assert_array_equal(complete[1], blocks)


def test_a_window_bounds_the_tables() -> None:
    """2,048 blocks of keys and a window of 1,024: a block of queries sees 3 blocks of keys."""
    table = BlockTable(512, 2048, 1024)
    assert table.width == 3
    assert table.height(64) == 6
    assert BlockTable(512, 2048, None).width == 2048
