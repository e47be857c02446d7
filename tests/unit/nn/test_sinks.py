"""Attention sinks against the formula in NumPy, with each kernel, a cache, packed documents and windows."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.hardware.mesh import MeshShape
from forerun.models.base import Capabilities
from forerun.nn.attention import Kernel, Scores, _splash_local, attention, cached_attention, split_over_devices
from forerun.nn.kv_cache import CachedLayer
from forerun.program import kernels
from forerun.program.build import make_mesh

ROWS, LENGTH, HEADS, KV_HEADS, HEAD = 2, 256, 4, 2, 64
RNG = np.random.default_rng(0)
SHAPES = ((ROWS, LENGTH, HEADS, HEAD), (ROWS, LENGTH, KV_HEADS, HEAD), (ROWS, LENGTH, KV_HEADS, HEAD))
Q, K, V = (RNG.normal(size=shape).astype(np.float32) for shape in SHAPES)
WEIGHTS = RNG.normal(size=SHAPES[0]).astype(np.float32)
SINKS = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)
SEGMENTS = np.ones((ROWS, LENGTH), np.int32)
SEGMENTS[0, 100:] = 2
SEGMENTS[1, 230:] = 0  # padding


def expected(sinks: Any, window: int | None, q: Any = Q, k: Any = K, v: Any = V) -> Any:
    """The definition: a column with the sink beside the scores, which is dropped after the softmax."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * HEAD**-0.5
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    seen = (behind >= 0) & (behind < (window or LENGTH)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    scores = jnp.where(seen[:, None], scores, -1e30)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    shares = jax.nn.softmax(jnp.concatenate((scores, column), axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", shares, v)


def of_kernel(kind: str, window: int | None) -> Any:
    if kind == "splash":
        scores, kernel = Scores(HEAD**-0.5, None, window), Kernel("splash", block=128)
        return lambda sinks, q, k, v: _splash_local(
            q, k, v, SEGMENTS, sinks, scores=scores, kernel=kernel, interpret=True
        )
    kernel = Kernel("xla", block=64 if kind == "blocks" else LENGTH)
    return lambda sinks, q, k, v: attention(q, k, v, SEGMENTS, window=window, kernel=kernel, sinks_H=sinks)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kind", ["xla", "blocks", "splash"])
def test_outputs_and_gradients(kind: str, window: int | None) -> None:
    def total(run: Any, *arrays: Any) -> Any:
        out = run(*arrays)
        return jnp.sum(out * WEIGHTS), out

    def both(run: Any) -> Any:
        return jax.jit(jax.grad(partial(total, run), argnums=(0, 1, 2, 3), has_aux=True))(SINKS, Q, K, V)

    wanted, found = both(lambda sinks, *arrays: expected(sinks, window, *arrays)), both(of_kernel(kind, window))
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-5)
    for one, other in zip(found[0], wanted[0], strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


def test_devices_have_the_sinks_of_their_heads() -> None:
    """Rows and heads are split over four devices. The gradient of a sink is the sum over the rows."""
    kernel, scores = Kernel("splash", block=128), Scores(HEAD**-0.5, None, None)
    local = partial(_splash_local, scores=scores, kernel=kernel, interpret=True)

    def total(sinks: Any) -> Any:
        return jnp.sum(split_over_devices(local, Q, K, V, SEGMENTS, sinks_H=sinks) * WEIGHTS)

    wanted = jax.value_and_grad(lambda sinks: jnp.sum(expected(sinks, None) * WEIGHTS))(SINKS)
    with jax.set_mesh(make_mesh(MeshShape(1, 2, 2), jax.devices()[:4])):
        found = jax.jit(jax.value_and_grad(total))(SINKS)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4)


@pytest.mark.parametrize("window", [None, 70])
def test_a_cache_gives_the_same(window: int | None) -> None:
    """The last 16 tokens of the first document of row 1 attend to a cache of the others."""
    first, end = 214, 230
    positions = np.arange(first, end)[None]
    old = CachedLayer(*(jnp.swapaxes(jnp.asarray(x[1:, :first]), 1, 2) for x in (K, V)))
    new = (jnp.asarray(x[1:, first:end]) for x in (Q, K, V))
    out = cached_attention(*new, old, jnp.asarray(positions), window=window, sinks_H=jnp.asarray(SINKS))
    np.testing.assert_allclose(out[0], expected(SINKS, window)[1, first:end], atol=1e-5)


def test_the_gradient_of_bfloat16_sinks_is_close() -> None:
    """The kernel multiplies and adds the parts of this gradient in bfloat16."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V)]

    def total(run: Any, sinks: Any) -> Any:
        return jnp.sum(run(sinks, *arrays).astype(jnp.float32) * WEIGHTS)

    wide = [x.astype(jnp.float32) for x in arrays]
    wanted = jax.grad(lambda sinks: jnp.sum(expected(sinks, None, *wide) * WEIGHTS))(SINKS)
    found = jax.grad(partial(total, of_kernel("splash", None)))(SINKS)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())


class _WithSinks:
    vocab, heads, capabilities = 8, 4, Capabilities(attention_sinks=True)


def test_gpus_compute_sinks_by_xla() -> None:
    choice = kernels.attention("auto", "gpu", "NVIDIA H100 80GB HBM3", "bfloat16", _WithSinks())  # type: ignore[arg-type]
    assert choice.kernel.name == "xla"
    assert "sinks" in (choice.obstacle or "")
    assert kernels.attention("auto", "gpu", "NVIDIA H100 80GB HBM3", "bfloat16").kernel.name == "cudnn"
    assert kernels.attention("auto", "tpu", "TPU v6 lite", "bfloat16", _WithSinks()).kernel.name == "splash"  # type: ignore[arg-type]
