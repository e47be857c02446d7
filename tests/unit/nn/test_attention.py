"""Every attention path against a plain softmax in float64, position by position."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from forerun.nn import attention as module
from forerun.nn import sharding
from forerun.nn.attention import Kernel, attention, block_length

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def drawn(length: int, heads: int, kv_heads: int, width: int, rows: int = 2) -> Arrays:
    """q, k, v and segments: two documents, and padding at the end of the first row."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(rows, length, n, width)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    segments = np.ones((rows, length), np.int32)
    segments[:, length // 3 :] = 2
    segments[0, -length // 8 :] = 0
    return q, k, v, jnp.asarray(segments)


def plain(q: Any, k: Any, v: Any, segments: Any, window: int | None) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    segments = np.asarray(segments)
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        kv = h * k.shape[2] // q.shape[2]
        first = 0 if window is None else max(0, t - window + 1)
        seen = [s for s in range(first, t + 1) if segments[b, s] == segments[b, t]]
        scores = k[b, seen, kv] @ q[b, t, h] / np.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max())
        out[b, t, h] = shares / shares.sum() @ v[b, seen, kv]
    return out


def gradients(arrays: Arrays, window: int | None, kernel: Kernel) -> tuple[jax.Array, ...]:
    """(out, dq, dk, dv) under a fixed random cotangent."""
    q, k, v, segments = arrays
    pull = jnp.asarray(np.random.default_rng(9).normal(size=q.shape), jnp.float32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(q, k, v, segments, window=window, kernel=kernel)
        return jnp.sum(out * pull), out

    (_, out), slopes = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return out, *slopes


def assert_same(got: tuple[jax.Array, ...], expected: tuple[jax.Array, ...], tolerance: float) -> None:
    for name, have, want in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=tolerance * float(jnp.abs(want).max()), err_msg=name)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("block", [512, 8, 7], ids=["whole", "blockwise", "does-not-divide"])
def test_xla_is_plain_softmax(window: int | None, block: int) -> None:
    arrays = drawn(24, heads=4, kv_heads=2, width=8)
    got = attention(*arrays, window=window, kernel=Kernel("xla", block=block))
    np.testing.assert_allclose(got, plain(*arrays, window), rtol=0, atol=1e-5)


def test_a_block_with_a_window_reads_only_the_keys_of_its_window() -> None:
    q, segments = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def shapes(window: int | None) -> set[tuple[int, ...]]:
        run = partial(attention, window=window, kernel=Kernel("xla", block=512))
        text = jax.jit(run).lower(q, q, q, segments).as_text()
        return {tuple(map(int, sizes.split("x")[:-1])) for sizes in re.findall(r"tensor<((?:\d+x)+f32)>", text)}

    assert (1, 2, 1, 512, 4096) in shapes(None)
    assert (1, 2, 1, 512, 512 + 127) in shapes(128)
    assert (1, 2, 1, 512, 4096) not in shapes(128)


@pytest.mark.parametrize("window", [None, 5])
def test_blockwise_gradients_are_those_of_the_whole(window: int | None) -> None:
    arrays = drawn(24, heads=4, kv_heads=2, width=8)
    whole, blockwise = (gradients(arrays, window, Kernel("xla", block=block)) for block in (512, 8))
    assert_same(blockwise, whole, 1e-5)


def test_blockwise_never_holds_all_scores() -> None:
    arrays = drawn(64, heads=2, kv_heads=2, width=4, rows=1)

    def largest(block: int) -> int:
        function = partial(attention, window=None, kernel=Kernel("xla", block=block))
        memory = jax.jit(function).lower(*arrays).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    scores_bytes = 2 * 64 * 64 * 4
    assert largest(512) >= scores_bytes > largest(8)


@pytest.mark.parametrize(
    ("rows", "length", "heads", "tp", "expected"),
    [
        (2, 4096, 32, 1, 512),
        (2, 32768, 32, 1, 128),
        (2, 32768, 32, 2, 256),
        (64, 32768, 64, 1, 64),
        (64, 96, 8, 1, 512),
    ],
)
def test_blocks_shrink_with_the_scores(rows: int, length: int, heads: int, tp: int, expected: int) -> None:
    """At most 1 GiB of float32 scores: rows x heads x block x length x 4 bytes."""
    mesh = Mesh(np.array(jax.devices()[:tp]).reshape(1, 1, tp), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        assert block_length((rows, length, heads, 128), 512) == expected


def test_whole_of_bfloat16_is_near() -> None:
    arrays = drawn(24, heads=4, kv_heads=2, width=8)
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays[:3])
    got = attention(q, k, v, arrays[3], window=None, kernel=Kernel("xla"))
    assert got.dtype == jnp.bfloat16
    expected = plain(*(x.astype(jnp.float32) for x in (q, k, v)), arrays[3], None)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0, atol=0.03)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The splash kernel's own code, run by the Pallas interpreter in place of Mosaic."""
    monkeypatch.setattr(module, "_splash_local", partial(module._splash_local, interpret=True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "width", "window", "kernel"),
    [
        (256, 2, 2, 128, None, Kernel("splash", block=128)),
        (200, 4, 2, 64, None, Kernel("splash", block=128)),
        (200, 4, 1, 64, 50, Kernel("splash", block=512, fused_backward=True)),
        (256, 2, 1, 128, 130, Kernel("splash", block=128)),
    ],
    ids=["mha-128", "gqa-64-odd-length", "fused-64-window", "gqa-128-window"],
)
def test_splash_is_the_xla_path(
    length: int, heads: int, kv_heads: int, width: int, window: int | None, kernel: Kernel
) -> None:
    arrays = drawn(length, heads, kv_heads, width)
    assert_same(gradients(arrays, window, kernel), gradients(arrays, window, Kernel("xla")), 1e-4)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["divides", "fewer-than-tp"])
def test_splash_on_a_mesh(kv_heads: int) -> None:
    arrays = drawn(128, heads=4, kv_heads=kv_heads, width=64)
    expected = attention(*arrays, window=None, kernel=Kernel("xla"))
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 4), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        got = jax.jit(partial(attention, window=None, kernel=Kernel("splash", block=128)))(*arrays)
    assert got.sharding.shard_shape(got.shape) == (1, 128, 1, 64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
