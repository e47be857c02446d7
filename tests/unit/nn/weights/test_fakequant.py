"""Weights that are rounded on the way forward: against numpy, and against the straight-through rule in torch.

Numbers that are integers times scales give these integers and scales again, however they are held.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from forerun.nn.weights.fakequant import FakeQuantized, as_bfloat16, limits

RNG = np.random.default_rng(3)
BEGINNING = RNG.bit_generator.state
# equation, weight, number of inputs: one input, two inputs (heads back to the stream), two outputs (heads)
FORMS = {
    "mlp": ("BSE,EF->BSF", (24, 10), 1),
    "out": ("BSHD,HDE->BSE", (4, 6, 10), 2),
    "query": ("BSE,EHD->BSHD", (24, 2, 5), 1),
}


@pytest.fixture(autouse=True)
def _from_the_beginning() -> None:
    """Every test draws the same, whichever tests came before it."""
    RNG.bit_generator.state = BEGINNING


def weight_of(shape: tuple[int, ...], inputs: int, **more: Any) -> FakeQuantized[jax.Array]:
    value = RNG.normal(size=shape).astype(np.float32)
    value[..., 0] = 0  # a channel of zeros
    value[..., 1] *= 1e-6
    return FakeQuantized(value=jnp.asarray(value), inputs=inputs, outputs=len(shape) - inputs, **more)


def in_numpy(value: np.ndarray, inputs: int, bits: int, group: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(codes, numbers), a column and a group at a time."""
    columns = value.reshape(int(np.prod(value.shape[:inputs])), -1)
    codes, numbers = np.zeros(columns.shape, np.int64), np.zeros_like(columns)
    size = group or len(columns)
    for o in range(columns.shape[1]):
        for start in range(0, len(columns), size):
            part = columns[start : start + size, o]
            largest = max(np.abs(part).max(), np.float32(1e-30))
            scale = (largest / np.float32((2**bits - 1) / 2)).astype(ml_dtypes.bfloat16).astype(np.float32)
            code = np.clip(np.rint(part / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            codes[start : start + size, o], numbers[start : start + size, o] = code, code * scale
    return codes.reshape(value.shape), numbers.reshape(value.shape)


@pytest.mark.parametrize(("bits", "group"), [(4, 8), (8, None)])
@pytest.mark.parametrize("form", FORMS)
def test_the_forward_pass_is_numpys(form: str, bits: int, group: int | None) -> None:
    equation, shape, inputs = FORMS[form]
    weight = weight_of(shape, inputs, bits=bits, group=group)
    codes, numbers = in_numpy(np.asarray(weight.value), inputs, bits, group)
    np.testing.assert_array_equal(weight.codes()[0], codes)
    np.testing.assert_array_equal(weight.matrix("", jnp.float32), numbers.astype(np.float32))
    assert np.abs(codes).max() == 2 ** (bits - 1), "every code is used, the lowest too"
    x = RNG.normal(size=[3, 5, *shape[:inputs]]).astype(np.float32)
    got = weight.contract(equation, jnp.asarray(x))
    np.testing.assert_allclose(got, np.einsum(equation, x, numbers), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learned", [False, True])
def test_layers_in_a_stack_are_rounded_one_by_one(learned: bool) -> None:
    stacked = weight_of((3, 4, 6, 10), 2, bits=4, group=6)
    stacked = replace(stacked, outputs=1)
    if learned:
        scales = jnp.asarray(RNG.normal(-2, 0.3, (3, 4, 10)), jnp.float32)
        stacked = replace(stacked, log_scale=scales)
    whole, (codes, scale) = stacked.matrix("", jnp.float32), stacked.codes()
    assert scale.shape == (3, 4, 10)
    for n in range(3):
        one = jax.tree.map(lambda leaf, n=n: leaf[n], stacked)
        np.testing.assert_array_equal(one.matrix("", jnp.float32), whole[n])
        np.testing.assert_array_equal(one.codes()[0], codes[n])
    exact = np.asarray(codes, np.float32).reshape(3, 4, 6, 10) * np.asarray(scale, np.float32)[:, :, None]
    np.testing.assert_array_equal(whole, exact.reshape(3, 4, 6, 10), "what is shipped is what was multiplied")


def test_a_scale_is_a_bfloat16_in_a_compiled_program_too() -> None:
    x = jnp.asarray(RNG.normal(size=1000), jnp.float32)
    expected = np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(as_bfloat16)(x), expected)


@pytest.mark.torch
@pytest.mark.parametrize("scales", ["computed", "learned"])
@pytest.mark.parametrize(("form", "group", "activations"), [("mlp", None, False), ("out", 8, True), ("query", 8, True)])
def test_gradients_are_those_of_the_rule_in_torch(form: str, group: int | None, activations: bool, scales: str) -> None:
    """torch's own autograd through detach: x + (rounded(x) - x).detach(), and LSQ as its paper's appendix writes it."""
    import torch

    equation, shape, inputs = FORMS[form]
    weight = weight_of(shape, inputs, bits=4, group=group, activations=activations)
    x = RNG.normal(size=[2, 3, *shape[:inputs]]).astype(np.float32)
    groups = int(np.prod(shape[:inputs])) // (group or int(np.prod(shape[:inputs])))
    if scales == "learned":
        start = jnp.asarray(RNG.normal(-1.5, 0.4, (groups, *shape[inputs:])), jnp.float32)
        weight = replace(weight, log_scale=start)
    pull = RNG.normal(size=weight.contract(equation, jnp.asarray(x)).shape).astype(np.float32)

    def pulled(weight: FakeQuantized[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(weight.contract(equation, x) * pull)

    ours, of_x = jax.jit(jax.grad(pulled, argnums=(0, 1)))(weight, jnp.asarray(x))

    value = torch.tensor(np.asarray(weight.value), requires_grad=True)
    inside = torch.tensor(x, requires_grad=True)
    flat = value.reshape(groups, -1, *shape[inputs:])
    log_scale = None
    if scales == "learned":
        log_scale = torch.tensor(np.asarray(weight.log_scale), requires_grad=True)
        scale = torch.exp(log_scale)
        scale = scale + (scale.to(torch.bfloat16).float() - scale).detach()
        share = 1 / (flat.shape[1] * 7) ** 0.5
        scale = ((scale - scale * share).detach() + scale * share)[:, None]  # grad_scale of the paper
        steps = (flat / scale).clamp(-8, 7)
        made = ((steps.round() - steps).detach() + steps) * scale  # round_pass of the paper
    else:
        scale = (flat.detach().abs().amax(1, keepdim=True).clamp_min(1e-30) / 7.5).to(torch.bfloat16).float()
        made = flat + ((flat / scale).round().clamp(-8, 7) * scale - flat).detach()
    used = inside
    if activations:
        dims = tuple(range(2, inside.ndim))
        step = inside.detach().abs().amax(dims, keepdim=True) / 127.5
        used = inside + ((inside / step).round().clamp(-127, 127) * step - inside).detach()
    (torch.einsum(equation, used, made.reshape(shape)) * torch.from_numpy(pull)).sum().backward()
    np.testing.assert_allclose(ours.value, value.grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_x, inside.grad, rtol=1e-4, atol=1e-5)
    if log_scale is not None:
        np.testing.assert_allclose(ours.log_scale, log_scale.grad, rtol=1e-4, atol=1e-5)
        assert 0 < np.mean(np.asarray(ours.value) == 0) < 0.7, "some numbers lie beyond the codes, and not most"


INPUTS, OUTPUTS = 64, 400


def drawn(bits: int, group: int | None, *, full: bool) -> tuple[np.ndarray, jax.Array]:
    """Codes, and scales that are bfloat16 numbers with all kinds of mantissas. With `full`, every group has a code at
    the end of the range, as groups with computed scales have: the lowest, the largest or the largest but negative."""
    rng = np.random.default_rng(bits)
    low, high = limits(bits)
    codes = rng.integers(-high + 1, high, (INPUTS, OUTPUTS))
    if full:
        numbers = group or INPUTS
        for start in range(0, INPUTS, numbers):
            for end in (low, high, -high):
                columns = (
                    rng.random(OUTPUTS) < 0.5 if end != -high else np.abs(codes[start : start + numbers]).max(0) < high
                )
                codes[start + rng.integers(0, numbers, OUTPUTS)[columns], np.flatnonzero(columns)] = end
    scales = np.exp(rng.uniform(-9, 0, (INPUTS // (group or INPUTS), OUTPUTS)))
    return codes.astype(np.int8), jnp.asarray(scales, jnp.bfloat16)


def weight(codes: np.ndarray, scales: jax.Array, bits: int, group: int | None, dtype: str) -> FakeQuantized[jax.Array]:
    exact = codes.astype(np.float32) * np.repeat(np.asarray(scales.astype(jnp.float32)), group or INPUTS, axis=0)
    value = jnp.asarray(exact).astype(dtype)
    return FakeQuantized(value=value, scale=scales, inputs=1, outputs=1, bits=bits, group=group)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, None), (8, 16), (8, None)])
def test_given_scales_give_the_codes_back(bits: int, group: int | None, dtype: str) -> None:
    codes, scales = drawn(bits, group, full=False)
    got = jax.jit(lambda one: one.codes())(weight(codes, scales, bits, group, dtype))
    np.testing.assert_array_equal(got[0], codes)
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(scales))


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, None), (8, 16), (8, None)])
def test_scales_can_be_computed_again(bits: int, group: int | None) -> None:
    codes, scales = drawn(bits, group, full=True)
    before = weight(codes, scales, bits, group, "float32")
    after = jax.jit(lambda one: one.computed())(before)
    assert after.scale is None
    got = jax.jit(lambda one: one.codes())(after)
    np.testing.assert_array_equal(got[0], codes)
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(scales))
    moved = np.abs(np.asarray(after.value - before.value)) / np.repeat(
        np.asarray(scales.astype(np.float32)), group or INPUTS, axis=0
    )
    assert moved.max() <= 0.5, "no number leaves the codes that are nearest"
    plain = FakeQuantized(value=before.value, inputs=1, outputs=1, bits=bits, group=group)
    assert np.mean(np.asarray(plain.codes()[1]) != np.asarray(scales)) > 0.5, "without it, scales would change"
