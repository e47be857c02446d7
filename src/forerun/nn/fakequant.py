"""A weight that learns as the integers it will be shipped as: rounded on the way forward, straight through on the way
back.

Symmetric: number = code x scale, codes of `bits` bits, one scale per output channel or per `group` neighbouring inputs
of it. The flattened inputs are cut into G groups of N numbers; O are the output dimensions. A scale is a bfloat16
number wherever it is used, so that every runtime holds the same one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.nn import sharding
from forerun.nn.spec import Fill, ParamSpec

T = TypeVar("T")
ACTIVATION_BITS = 8
_SMALLEST = 1e-30  # of a largest number: a channel of zeros has a scale too


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FakeQuantized(Generic[T]):
    value: T  # [I..., O...], before rounding; layers may come first
    log_scale: T | None = None  # [G, O...]: learned scales, as logarithms; None: computed from the value
    scale: T | None = None  # [G, O...]: scales that came with the weights and stay; bfloat16 numbers
    inputs: int = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})
    bits: int = field(metadata={"static": True})
    group: int | None = field(default=None, metadata={"static": True})
    activations: bool = field(default=False, metadata={"static": True})  # inputs rounded too, token by token

    def matrix(self: FakeQuantized[jax.Array], axes: str, dtype: Any) -> jax.Array:
        wide = self.value.astype(jnp.float32)
        grouped = self._grouped(wide)
        scale = self._scale(grouped)
        if self.log_scale is None:
            made = straight(grouped, rounded(grouped, scale, self.bits))
        else:
            made = learned_step(grouped, scale, self.bits, self._lead)
        return sharding.gather(made.reshape(wide.shape).astype(dtype), axes)

    def contract(self: FakeQuantized[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        given, axes = equation.split("->")[0].split(",")
        if self.activations:
            x = rounded_tokens(x, tuple(given.index(letter) for letter in axes[: self.inputs]))
        return jnp.einsum(equation, x, self.matrix(axes, x.dtype))

    def codes(self: FakeQuantized[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(int8 in the shape of the value, scales [..., G, O...] in bfloat16): what the last forward multiplied."""
        grouped = self._grouped(self.value.astype(jnp.float32))
        scale = self._scale(grouped)
        low, high = limits(self.bits)
        codes = jnp.clip(jnp.round(grouped / scale), low, high).astype(jnp.int8)
        return codes.reshape(self.value.shape), jnp.squeeze(scale, self._lead + 1).astype(jnp.bfloat16)

    def computed(self: FakeQuantized[jax.Array]) -> FakeQuantized[jax.Array]:
        """Without the given scales: other numbers, from which the same codes and scales are computed.

        The largest number of a group must be half a step beyond the largest code. A code stays what it is if its
        number moves by less than half a step, so there is room for that, in float32. Scales that were computed once
        can be had in this way, and learned ones only if the largest code occurs in the group.
        """
        assert self.scale is not None
        low, high = limits(self.bits)
        grouped = self._grouped(self.value.astype(jnp.float32))
        scale = self._scale(grouped)
        codes = jnp.clip(jnp.round(grouped / scale), low, high)
        axis = self._lead + 1
        size = jnp.abs(codes)
        first = jnp.arange(codes.shape[axis]).reshape(-1, *(1,) * self.outputs) == jnp.argmax(
            size, axis=axis, keepdims=True
        )
        reaches = jnp.max(size, axis=axis, keepdims=True) >= high
        # A little to the inside or the outside of the middle between two codes: on all machines the same code.
        steps = jnp.where(first & reaches & (codes == high), high + 0.5, codes)
        steps = jnp.where(first & reaches & (codes == -high), -(high + 0.499), steps)
        steps = jnp.where(codes == low, -(high + 0.501), steps)
        value = (steps * scale).reshape(self.value.shape).astype(self.value.dtype)
        return replace(self, value=value, scale=None)

    @property
    def _lead(self: FakeQuantized[jax.Array]) -> int:
        return self.value.ndim - self.inputs - self.outputs

    def _grouped(self: FakeQuantized[jax.Array], value: jax.Array) -> jax.Array:
        """[..., G, N, O...]"""
        cut = self._lead + self.inputs
        total = math.prod(value.shape[self._lead : cut])
        numbers = self.group or total
        return value.reshape(*value.shape[: self._lead], total // numbers, numbers, *value.shape[cut:])

    def _scale(self: FakeQuantized[jax.Array], grouped: jax.Array) -> jax.Array:
        """[..., G, 1, O...]"""
        if self.scale is not None:
            return jnp.expand_dims(self.scale.astype(jnp.float32), self._lead + 1)
        if self.log_scale is None:
            return computed_scale(grouped, self.bits, self._lead)
        return jnp.expand_dims(as_bfloat16(jnp.exp(self.log_scale.astype(jnp.float32))), self._lead + 1)


def scale_spec(value: ParamSpec, group: int | None) -> ParamSpec:
    """Of the scales of such a weight: [L, G, O...]."""
    lead = 1 if value.axes.startswith("L") else 0
    cut = lead + value.inputs
    total = math.prod(value.shape[lead:cut])
    shape = (*value.shape[:lead], total // (group or total), *value.shape[cut:])
    return ParamSpec(shape, f"{value.axes[:lead]}G{value.axes[cut:]}", Fill(0.0), decay=False)


def limits(bits: int) -> tuple[int, int]:
    """The smallest and the largest code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


@jax.custom_vjp
def straight(x: jax.Array, y: jax.Array) -> jax.Array:
    """y, to the last bit; its gradient goes to x as if nothing had happened."""
    return y


def _straight_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
    return y, None


def _straight_backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, jnp.zeros_like(gradient)


straight.defvjp(_straight_forward, _straight_backward)


@jax.custom_vjp
def as_bfloat16(x: jax.Array) -> jax.Array:
    """The nearest bfloat16, still as float32, by an operation that no compiler leaves out. Straight through."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


as_bfloat16.defvjp(lambda x: (as_bfloat16(x), None), lambda _, gradient: (gradient,))


def computed_scale(grouped: jax.Array, bits: int, lead: int) -> jax.Array:
    """[..., G, 1, O...]: the largest number lies half a step beyond the largest code, so none is off by more than
    half a step and no step is wasted."""
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(grouped)), axis=lead + 1, keepdims=True)
    return jax.lax.stop_gradient(as_bfloat16(jnp.maximum(largest, _SMALLEST) * _step(bits)))


def rounded(x: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """The nearest code times its scale."""
    low, high = limits(bits)
    return jnp.clip(jnp.round(x / scale), low, high) * scale


def rounded_tokens(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Activations as 8-bit codes with a scale per token: over `dims`, the dimensions that a contraction sums over."""
    wide = jax.lax.stop_gradient(x).astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=dims, keepdims=True)
    scale = jnp.maximum(largest, _SMALLEST) * _step(ACTIVATION_BITS)
    # The largest lies at 127.5 steps but for the last bit, either side: -127 on all machines, not -127 or -128 by luck.
    codes = jnp.clip(jnp.round(wide / scale), -limits(ACTIVATION_BITS)[1], limits(ACTIVATION_BITS)[1])
    return straight(x, (codes * scale).astype(x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def learned_step(grouped: jax.Array, scale: jax.Array, bits: int, lead: int) -> jax.Array:
    """`rounded` with the gradient of LSQ (Esser et al. 2020): numbers beyond the codes have none; that of a scale is
    what rounding changes, divided by sqrt(numbers x largest code)."""
    return rounded(grouped, scale, bits)


def _learned_forward(grouped: jax.Array, scale: jax.Array, bits: int, lead: int) -> tuple[jax.Array, Any]:
    return rounded(grouped, scale, bits), (grouped, scale)


def _learned_backward(bits: int, lead: int, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    grouped, scale = kept
    low, high = limits(bits)
    steps = grouped / scale
    inside = (steps > low) & (steps < high)
    slope = jnp.where(inside, jnp.round(steps) - steps, jnp.clip(steps, low, high))
    share = 1.0 / math.sqrt(grouped.shape[lead + 1] * high)
    of_scale = share * jnp.sum(gradient * slope, axis=lead + 1, keepdims=True)
    return jnp.where(inside, gradient, jnp.zeros_like(gradient)), of_scale


learned_step.defvjp(_learned_forward, _learned_backward)


def _step(bits: int) -> float:
    """As a share of the largest number. A factor: compilers divide by a constant in ways of their own."""
    return 2 / (2**bits - 1)
