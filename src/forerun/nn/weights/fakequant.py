"""Fake-quantized weights for quantization-aware training.

The forward pass rounds the weight to the integers that an export will contain. The backward pass ignores the rounding
(straight-through estimator).

Quantization is symmetric: value = code x scale, with codes of `bits` bits. There is one scale per output channel, or
per `group` neighbouring inputs of a channel. The flattened inputs are divided into G groups of N values; O are the
output dimensions. Scales are rounded to bfloat16 wherever they are used, so that every runtime uses the same value.
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
_SMALLEST = 1e-30  # lower bound for the largest magnitude, so that a channel of zeros has a positive scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FakeQuantized(Generic[T]):
    """A weight that is rounded in every forward pass."""

    value: T  # [I..., O...], before rounding; layers may come first
    log_scale: T | None = None  # [G, O...]: logarithms of learned scales; None: scales are computed from the value
    scale: T | None = None  # [G, O...]: fixed scales that were read with the weights, representable in bfloat16
    inputs: int = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})
    bits: int = field(metadata={"static": True})
    group: int | None = field(default=None, metadata={"static": True})
    activations: bool = field(default=False, metadata={"static": True})  # also round the inputs, token by token

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
        """Return the codes (int8, shape of the value) and scales (bfloat16, [..., G, O...]) of the forward pass."""
        grouped = self._grouped(self.value.astype(jnp.float32))
        scale = self._scale(grouped)
        low, high = limits(self.bits)
        codes = jnp.clip(jnp.round(grouped / scale), low, high).astype(jnp.int8)
        return codes.reshape(self.value.shape), jnp.squeeze(scale, self._lead + 1).astype(jnp.bfloat16)

    def computed(self: FakeQuantized[jax.Array]) -> FakeQuantized[jax.Array]:
        """Return a weight without fixed scales whose values give the same codes and scales when they are computed.

        `computed_scale` needs the largest value of a group to be half a step beyond the largest code. A code does not
        change if its value moves by less than half a step, so float32 values can be moved there. This reproduces
        scales that were computed before. It reproduces learned scales only if the largest code occurs in the group.
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
        # Slightly inside or outside the midpoint between two codes, so that all machines round to the same code.
        steps = jnp.where(first & reaches & (codes == high), high + 0.5, codes)
        steps = jnp.where(first & reaches & (codes == -high), -(high + 0.499), steps)
        steps = jnp.where(codes == low, -(high + 0.501), steps)
        value = (steps * scale).reshape(self.value.shape).astype(self.value.dtype)
        return replace(self, value=value, scale=None)

    @property
    def _lead(self: FakeQuantized[jax.Array]) -> int:
        return self.value.ndim - self.inputs - self.outputs

    def _grouped(self: FakeQuantized[jax.Array], value: jax.Array) -> jax.Array:
        """Return `value` with its inputs divided into groups, [..., G, N, O...]."""
        cut = self._lead + self.inputs
        total = math.prod(value.shape[self._lead : cut])
        numbers = self.group or total
        return value.reshape(*value.shape[: self._lead], total // numbers, numbers, *value.shape[cut:])

    def _scale(self: FakeQuantized[jax.Array], grouped: jax.Array) -> jax.Array:
        """Return the scales in float32, [..., G, 1, O...]."""
        if self.scale is not None:
            return jnp.expand_dims(self.scale.astype(jnp.float32), self._lead + 1)
        if self.log_scale is None:
            return computed_scale(grouped, self.bits, self._lead)
        return jnp.expand_dims(as_bfloat16(jnp.exp(self.log_scale.astype(jnp.float32))), self._lead + 1)


def scale_spec(value: ParamSpec, group: int | None) -> ParamSpec:
    """Return the spec of the scales of a weight, [L, G, O...]. L is absent if the weight has no layer dimension."""
    lead = 1 if value.axes.startswith("L") else 0
    cut = lead + value.inputs
    total = math.prod(value.shape[lead:cut])
    shape = (*value.shape[:lead], total // (group or total), *value.shape[cut:])
    return ParamSpec(shape, f"{value.axes[:lead]}G{value.axes[cut:]}", Fill(0.0), decay=False)


def limits(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


@jax.custom_vjp
def straight(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return `y` unchanged; its gradient goes to `x` (straight-through estimator).

    The usual `x + stop_gradient(y - x)` would not return `y` exactly.
    """
    return y


def _straight_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
    return y, None


def _straight_backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, jnp.zeros_like(gradient)


straight.defvjp(_straight_forward, _straight_backward)


@jax.custom_vjp
def as_bfloat16(x: jax.Array) -> jax.Array:
    """Return `x` rounded to bfloat16 precision, as float32. The gradient ignores the rounding.

    Compilers may remove a cast to bfloat16 and back, but not `reduce_precision`.
    """
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


as_bfloat16.defvjp(lambda x: (as_bfloat16(x), None), lambda _, gradient: (gradient,))


def computed_scale(grouped: jax.Array, bits: int, lead: int) -> jax.Array:
    """Return the scale of each group from its largest magnitude, [..., G, 1, O...].

    The largest magnitude is half a step beyond the largest code. No value is then off by more than half a step, and
    the codes cover the complete range.
    """
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(grouped)), axis=lead + 1, keepdims=True)
    return jax.lax.stop_gradient(as_bfloat16(jnp.maximum(largest, _SMALLEST) * _step(bits)))


def rounded(x: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Return the nearest code of each value times its scale."""
    low, high = limits(bits)
    return jnp.clip(jnp.round(x / scale), low, high) * scale


def rounded_tokens(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Return activations rounded to 8 bits with one scale per token; the gradient ignores the rounding.

    The scale covers `dims`, the dimensions that the contraction sums over.
    """
    wide = jax.lax.stop_gradient(x).astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=dims, keepdims=True)
    scale = jnp.maximum(largest, _SMALLEST) * _step(ACTIVATION_BITS)
    # The largest magnitude is at 127.5 steps, up to the last bit. Clip at -127: otherwise the last bit would decide
    # between -127 and -128, and machines would differ.
    codes = jnp.clip(jnp.round(wide / scale), -limits(ACTIVATION_BITS)[1], limits(ACTIVATION_BITS)[1])
    return straight(x, (codes * scale).astype(x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def learned_step(grouped: jax.Array, scale: jax.Array, bits: int, lead: int) -> jax.Array:
    """Return `rounded(grouped, scale, bits)` with the gradients of LSQ (Esser et al. 2020).

    Values beyond the range of the codes have no gradient. The gradient of a scale is divided by
    sqrt(N x largest code), where N is the number of values that share it.
    """
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
    """Return the step size relative to the largest value. Multiply by it: XLA may rewrite a division by a constant."""
    return 2 / (2**bits - 1)
