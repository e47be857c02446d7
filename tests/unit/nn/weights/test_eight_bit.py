"""Products of 8 bits against integer arithmetic in numpy, and their gradients against those of floats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from error_assertions import assert_error
from jax.sharding import AxisType
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.nn import sharding
from forerun.nn.weights.eight_bit import (
    EXACT_TERMS,
    INT32_TERMS,
    LARGEST,
    Kind,
    Letters,
    Numerics,
    codes_and_scale,
    product,
    rounding_noise,
    weight_codes,
)

Array = NDArray[Any]
# Shapes of (B, S), inputs and outputs: a gradient of w that rounds x again, one that rounds g again, and a long sum.
SHAPES = {
    "BSE,EF->BSF": ((2, 8), (32,), (96,)),
    "BSHD,HDE->BSE": ((2, 8), (6, 32), (16,)),
    "BSF,FE->BSE": ((2, 8), (3000,), (24,)),
    "BSE,EHD->BSHD": ((3, 700), (24,), (4, 8)),
}


def drawn(equation: str) -> tuple[Array, Array, Array]:
    """Return x, w and the gradient of the result. Rows have very different sizes."""
    lead, ins, outs = SHAPES[equation]
    draw = np.random.default_rng(0)
    rows = draw.lognormal(sigma=2, size=lead)
    x = draw.normal(size=(*lead, *ins)) * rows.reshape(*lead, *(1,) * len(ins))
    w = draw.normal(size=(*ins, *outs)) * draw.lognormal(size=outs)
    g = draw.normal(size=(*lead, *outs)) * rows.reshape(*lead, *(1,) * len(outs))
    return x.astype(np.float32), w.astype(np.float32), g.astype(np.float32)


def numpy_codes(x: Array, axis: int, form: str = "int8") -> tuple[Array, Array]:
    """Return codes and scales of a matrix. `axis` is summed."""
    largest = np.abs(x).max(axis, keepdims=True)
    unit = (x * (np.float32(LARGEST[form]) / largest)).astype(np.float32)
    if form == "int8":
        codes = np.rint(unit).astype(np.int64)
    else:
        own = ml_dtypes.float8_e4m3fn if form == "e4m3" else ml_dtypes.float8_e5m2
        codes = np.clip(unit, -LARGEST[form], LARGEST[form]).astype(own).astype(np.float64)
    return codes, (largest / np.float32(LARGEST[form])).astype(np.float64)


def by_hand(equation: str, x: Array, w: Array, g: Array, kind: Kind) -> tuple[Array, Array, Array]:
    """Return y, dx and dw with plain matrices, exact sums and no stochastic rounding."""
    inputs = len(Letters.of(equation).ins)
    ins = int(np.prod(w.shape[:inputs]))
    x2, w2 = x.reshape(-1, ins), w.reshape(ins, -1)
    g2 = g.reshape(-1, w2.shape[1])
    values, errors = ("int8", "int8") if kind == "int8" else ("e4m3", "e5m2")
    cx, sx = numpy_codes(x2, 1, values)
    cw, sw = numpy_codes(w2, 0, values)
    y = (cx @ cw) * sx * sw
    cg, sg = numpy_codes(g2, 1, errors)
    ct, st = numpy_codes(w2, 1, values)
    dx = (cg @ ct.T) * sg * st.T
    if 3 * ins <= 5 * w2.shape[1]:
        again, scale = numpy_codes((cx * (sx.astype(np.float32) * sg.astype(np.float32))).astype(np.float32), 0, values)
        dw = (again.T @ cg) * scale.T
    else:
        again, scale = numpy_codes((g2 * sx).astype(np.float32), 0, errors)
        dw = (cx.T @ again) * scale
    return y.reshape(g.shape), dx.reshape(x.shape), dw.reshape(w.shape)


def computed(equation: str, x: Any, w: Any, g: Any, how: Numerics, seed: int | None = None) -> tuple[Any, Any, Any]:
    inputs = len(Letters.of(equation).ins)
    key = None if seed is None else jnp.uint32(seed)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(equation, how, x, w, weight_codes(jax.lax.stop_gradient(w), inputs, how), key)

    y, back = jax.vjp(jax.jit(run), jnp.asarray(x), jnp.asarray(w))
    return (y, *back(jnp.asarray(g)))


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("equation", SHAPES)
def test_products_are_those_of_numpy(equation: str, kind: Kind, floats: bool) -> None:
    """The sums of int8 are exact, also those of a CPU that multiplies codes as float32; scaling rounds twice."""
    x, w, g = drawn(equation)
    expected = by_hand(equation, x, w, g, kind)
    found = computed(equation, x, w, g, Numerics(kind, floats))
    tolerance = 5e-7 if kind == "int8" else 1e-5  # fp8 sums in float32
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())


def test_a_cpu_has_the_sums_of_int32_bit_for_bit() -> None:
    """The last two shapes have sums of more terms than float32 adds exactly."""
    assert EXACT_TERMS < 2100 < 3000
    assert EXACT_TERMS * 127**2 <= 1 << 24
    assert INT32_TERMS * 127**2 < 1 << 31
    for equation in SHAPES:
        x, w, g = drawn(equation)
        for ours, theirs in zip(
            computed(equation, x, w, g, Numerics("int8", floats=True), 7),
            computed(equation, x, w, g, Numerics("int8"), 7),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.05), ("fp8", 0.08)])  # few rows are e^5 times the others
@pytest.mark.parametrize("equation", SHAPES)
def test_gradients_are_close_to_those_of_floats(equation: str, kind: Kind, bound: float) -> None:
    x, w, g = drawn(equation)
    y, back = jax.vjp(lambda x, w: jnp.einsum(equation, x, w, precision="highest"), jnp.asarray(x), jnp.asarray(w))
    seed = 3 if kind == "int8" else None
    for ours, theirs in zip(computed(equation, x, w, g, Numerics(kind), seed), (y, *back(jnp.asarray(g))), strict=True):
        assert jnp.linalg.norm(ours - theirs) < bound * jnp.linalg.norm(theirs)


@pytest.mark.parametrize("equation", ["BSE,EF->BSF", "BSHD,HDE->BSE"])
def test_expected_gradients_have_no_rounding(equation: str) -> None:
    """The mean over many seeds is the gradient for the codes of x and w. Rounding to the nearest code is not."""
    x, w, g = drawn(equation)
    g = np.abs(g) % 0.01 + 1e-3 * g  # most values are far below the largest one of their row
    seeds = jnp.arange(1000, dtype=jnp.uint32)
    inputs = len(Letters.of(equation).ins)
    how = Numerics("int8")
    codes = weight_codes(jnp.asarray(w), inputs, how)

    @jax.jit
    def gradients(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, back = jax.vjp(lambda x, w: product(equation, how, x, w, codes, seed), jnp.asarray(x), jnp.asarray(w))
        dx, dw = back(jnp.asarray(g))
        return dx, dw

    many = jax.lax.map(gradients, seeds)
    ins = int(np.prod(w.shape[:inputs]))
    cx, sx = numpy_codes(x.reshape(-1, ins), 1)
    ct, st = numpy_codes(w.reshape(ins, -1), 1)
    g2 = g.reshape(-1, ct.shape[1]).astype(np.float64)
    exact = (g2 @ (ct * st).T).reshape(x.shape), ((cx * sx).T @ g2).reshape(w.shape)
    for found, expected in zip(many, exact, strict=True):
        samples = np.asarray(found, np.float64)
        deviation = samples.std(0) / np.sqrt(len(samples))
        distance = np.abs(samples.mean(0) - expected)
        assert np.all(distance <= 6 * deviation + 1e-5 * np.abs(expected).max())
        assert np.mean(distance / (deviation + 1e-12)) < 1.2, "0.8 for a normal distribution without a bias"


def test_noise_of_two_places_is_independent() -> None:
    seeds = jnp.arange(4000, dtype=jnp.uint32)
    noise = np.asarray(jax.vmap(lambda seed: rounding_noise((2, 3, 4), 2, seed))(seeds)).reshape(4000, -1)
    assert noise.min() >= 0
    assert noise.max() < 1
    np.testing.assert_allclose(noise.mean(0), 0.5, atol=5 * 12**-0.5 * 4000**-0.5)
    correlation = np.corrcoef(noise.T) - np.eye(24)
    assert np.abs(correlation).max() < 5 * 4000**-0.5
    assert len(np.unique(np.asarray(rounding_noise((64, 512), 1, jnp.uint32(1))))) > 20_000


def test_zeros_and_values_that_are_not_finite() -> None:
    zeros, scale = codes_and_scale(jnp.zeros((2, 4)), (1,), "int8")
    assert not np.any(zeros)
    assert np.all(scale > 0)
    x, w, g = drawn("BSE,EF->BSF")
    for bad in (np.nan, np.inf):
        x[0, 3, 5] = g[1, 2, 7] = bad
        y, dx, dw = computed("BSE,EF->BSF", x, w, g, Numerics("int8"), 1)
        assert not np.any(np.isfinite(y[0, 3])), "a diverged run must be seen as such"
        assert np.all(np.isfinite(y[1]))
        assert not np.any(np.isfinite(dx[1, 2]))
        assert not np.all(np.isfinite(dw))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_eight_devices_have_the_result_of_one(kind: Kind, shape: tuple[int, int, int]) -> None:
    """Rows have the same codes everywhere. Only the gradient of the weight has scales for each device."""
    equation, axes = "BSE,EF->BSF", "EF"
    draw = np.random.default_rng(1)
    x = draw.normal(size=(8, 4, 256)).astype(np.float32)
    w, g = (draw.normal(size=size).astype(np.float32) for size in ((256, 512), (8, 4, 512)))
    seed = 5 if kind == "int8" else None
    one = computed(equation, x, w, g, Numerics(kind), seed)
    mesh = jax.make_mesh(shape, sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:8])
    placed = (
        jax.device_put(x, sharding.batched(mesh, x.shape, "BSE")),
        jax.device_put(w, sharding.stored(mesh, w.shape, axes)),
        jax.device_put(g, sharding.batched(mesh, g.shape, "BSF")),
    )
    with jax.set_mesh(mesh):
        many = computed(equation, *placed, Numerics(kind), seed)
    assert many[2].sharding.is_equivalent_to(sharding.stored(mesh, w.shape, axes), 2)
    for ours, theirs in zip(many[:2], one[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    exact = np.einsum("BSE,BSF->EF", x, g)
    for found in (one[2], many[2]):
        assert np.linalg.norm(found - exact) < (0.02 if kind == "int8" else 0.08) * np.linalg.norm(exact)


def test_an_equation_with_another_order_is_rejected() -> None:
    with pytest.raises(UserError) as caught:
        Letters.of("BSE,FE->BSF")
    assert_error(caught.value, "E-METHOD-126", what="BSE,FE->BSF")
