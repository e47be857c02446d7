"""Matrices in few bits against plain numpy, value by value."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from numpy.typing import NDArray

from forerun.nn import sharding
from forerun.nn.spec import Normal, ParamSpec, initial, stack
from forerun.nn.weights.quantized import KINDS, NF4, Quantized, quantized, quantized_spec

BLOCK = 16
LEVELS = {"int8": np.arange(-127, 128), "int4": np.arange(-7, 8), "nf4": np.array(NF4)}


def made(
    kind: str, shape: tuple[int, ...] = (64, 4, 8), axes: str = "EHD", inputs: int = 1, block: int = BLOCK
) -> tuple[Any, jax.Array]:
    spec = stack(ParamSpec(shape, axes, Normal(0.02), inputs=inputs), 3)
    dense = initial(spec, jax.random.key(1)).at[1, 0].set(0)  # some blocks have zeros
    return quantized(dense, quantized_spec(spec, kind, block)), dense


def by_hand(dense: NDArray[Any], kind: str, inputs: int) -> NDArray[Any]:
    """[layers, I..., O...], block by block."""
    levels, flat = LEVELS[kind], dense.reshape(len(dense), int(np.prod(dense.shape[1 : 1 + inputs])), -1)
    out = np.zeros_like(flat)
    for layer in range(flat.shape[0]):
        for first in range(0, flat.shape[1], BLOCK):
            for column in range(flat.shape[2]):
                block = flat[layer, first : first + BLOCK, column]
                scale = np.abs(block).max() / levels[-1]
                if scale:
                    nearest = np.abs(block[:, None] / scale - levels).argmin(axis=1)
                    out[layer, first : first + BLOCK, column] = levels[nearest] * scale
    return out.reshape(dense.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axes", "inputs"), [((64, 4, 8), "EHD", 1), ((4, 8, 32), "HDE", 2)])
def test_it_is_what_numpy_makes_of_it(kind: str, shape: tuple[int, ...], axes: str, inputs: int) -> None:
    leaf, dense = made(kind, shape, axes, inputs)
    matrix = np.asarray(leaf.matrix("", jnp.float32))
    np.testing.assert_allclose(matrix, by_hand(np.asarray(dense), kind, inputs), rtol=1e-6, atol=1e-9)
    bits = 8 if kind == "int8" else 4
    assert leaf.codes.nbytes * 8 == bits * dense.size
    assert leaf.scales.size * BLOCK == dense.size


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_is_further_than_half_a_gap(kind: str) -> None:
    leaf, dense = made(kind, block=64)
    levels = LEVELS[kind]
    error = np.abs(np.asarray(leaf.matrix("", jnp.float32) - dense)).reshape(3, -1, 64, 32)
    limit = np.asarray(leaf.scales)[:, :, None] * np.diff(levels).max() / 2
    assert (error <= limit * 1.0001 + 1e-12).all()
    relative = float(np.sqrt((error**2).mean()) / np.asarray(dense).std())
    assert relative == pytest.approx({"int8": 0.006, "int4": 0.108, "nf4": 0.092}[kind], rel=0.1), "as the page says"


def test_nf4_are_the_quantiles_of_its_paper() -> None:
    """bitsandbytes' create_normal_map: eight quantiles on the right, seven on the left, and zero."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    right = [quantile(offset + (0.5 - offset) * n / 8) for n in range(8)]
    left = [-quantile(offset + (0.5 - offset) * n / 7) for n in range(7)]
    np.testing.assert_allclose(NF4, np.array(sorted([*left, 0.0, *right])) / max(right), atol=3e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_contraction_and_its_gradient_are_those_of_the_dense_matrix(kind: str) -> None:
    stacked, _ = made(kind)
    leaf: Quantized[jax.Array] = jax.tree.map(lambda x: x[1], stacked)
    x = jax.random.normal(jax.random.key(2), (2, 5, 64))
    dense = leaf.matrix("EHD", jnp.float32)

    def both(function: Any) -> Any:
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(function(x))))(x)

    ours = both(lambda x: leaf.contract("BSE,EHD->BSHD", x))
    theirs = both(lambda x: jnp.einsum("BSE,EHD->BSHD", x, dense))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_nothing_dense_waits_for_the_backward_pass() -> None:
    stacked, _ = made("nf4")
    x = jax.random.normal(jax.random.key(2), (2, 5, 64))

    def loss(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: Quantized[jax.Array]) -> tuple[jax.Array, None]:
            return x + jnp.sin(weight.contract("BSE,EHD->BSHD", x)).reshape(2, 5, -1).repeat(2, -1), None

        return jnp.sum(jax.lax.scan(layer, x, stacked)[0])

    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    assert "f32[3,64,4,8]" not in text, "all layers of the dense matrix at once"
    assert "f32[64,4,8]" in text


@pytest.mark.parametrize("axes", ["EHD", "HDE"])
def test_split_as_the_dense_matrix_would_be(axes: str) -> None:
    """On fsdp 2 x tp 2 the codes lie split, and what comes out is the same."""
    sizes = {"E": 256, "H": 4, "D": 128}
    shape = tuple(sizes[letter] for letter in axes)
    spec = ParamSpec(shape, axes, Normal(0.02), inputs=1 if axes[0] == "E" else 2)
    like = quantized_spec(spec, "nf4", 64)
    leaf = quantized(initial(spec, jax.random.key(0)), like)
    given = "BSE" if axes[0] == "E" else "BSHD"
    out = "BSHD" if axes[0] == "E" else "BSE"
    x = jax.random.normal(jax.random.key(1), tuple({"B": 4, "S": 3, **sizes}[letter] for letter in given))
    expected = leaf.contract(f"{given},{axes}->{out}", x)
    mesh = jax.make_mesh((1, 2, 2), sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:4])
    places = [sharding.stored(mesh, one.shape, one.axes) for one in (like.codes, like.scales)]
    split = places[0].shard_shape(like.codes.shape)
    assert np.prod(split) * 4 == np.prod(like.codes.shape)
    placed = replace(leaf, codes=jax.device_put(leaf.codes, places[0]), scales=jax.device_put(leaf.scales, places[1]))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda leaf, x: leaf.contract(f"{given},{axes}->{out}", x))(placed, x)
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=2e-4, atol=2e-4)
