"""Frozen matrices stored in 4 or 8 bits: codes and a scale for every block of inputs.

N blocks along the inputs, b codes of one block (two per byte for 4 bits), O outputs. The matrix is dequantized right
before use, in the forward and again in the backward pass. Under a scan over layers, only the dense matrices of one
layer exist at a time. The matrices of all experts of a layer have X, the number of experts, before these dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.nn import sharding
from forerun.nn.spec import Fill, ParamSpec

T = TypeVar("T")
# NF4: the 16 quantiles of a normal distribution from the QLoRA paper, scaled to [-1, 1].
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
KINDS = ("int8", "int4", "nf4")
LARGEST = {"int8": 127, "int4": 7, "nf4": 1}  # the value of the code for the largest magnitude of a block


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantized(Generic[T]):
    """A quantized matrix, or one for each expert. `shape`, `axes` and `inputs` describe one dense matrix."""

    codes: T  # [N, b, O]: int8, or uint8 with the first half of a block in the low bits and the second in the high bits
    scales: T  # [N, O], float32
    kind: str = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    axes: str = field(metadata={"static": True})
    inputs: int = field(metadata={"static": True})
    share: float | None = field(default=None, metadata={"static": True})  # of the experts that each token uses

    def matrix(self: Quantized[jax.Array], axes: str, dtype: Any) -> jax.Array:
        lead = self.codes.shape[:-3]
        codes, scales = self.codes, self.scales
        if not lead:
            codes = sharding.gather(codes, _letters(self.axes, self.inputs, codes=True))
            scales = sharding.gather(scales, _letters(self.axes, self.inputs, codes=False))
        return (values(codes, self.kind) * scales[..., None, :]).astype(dtype).reshape(*lead, *self.shape)

    def contract(self: Quantized[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        return _contract(equation, x, self)

    def grouped(self: Quantized[jax.Array], x_NI: jax.Array, sizes_X: jax.Array) -> jax.Array:
        """Return each row multiplied by the matrix of its expert, [N, O]. Codes and scales are already gathered.

        The first `sizes_X[0]` rows belong to expert 0, and so on.
        """
        return _grouped(x_NI, self, sizes_X)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(equation: str, x: jax.Array, weight: Quantized[jax.Array]) -> jax.Array:
    return jnp.einsum(equation, x, weight.matrix(equation.split("->")[0].split(",")[1], x.dtype))


def _contract_forward(
    equation: str, x: jax.Array, weight: Quantized[jax.Array]
) -> tuple[jax.Array, Quantized[jax.Array]]:
    return _contract(equation, x, weight), weight


def _contract_backward(equation: str, weight: Quantized[jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    """Return the gradient of `x`. The frozen weight has none.

    The matrix is dequantized again: keeping it would keep the dense matrices of all layers until the backward pass.
    """
    sides, out = equation.split("->")
    given, axes = sides.split(",")
    return jnp.einsum(f"{out},{axes}->{given}", gradient, weight.matrix(axes, gradient.dtype)), None


_contract.defvjp(_contract_forward, _contract_backward)


@jax.custom_vjp
def _grouped(x_NI: jax.Array, weight: Quantized[jax.Array], sizes_X: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x_NI, _matrices(weight, x_NI.dtype), sizes_X)


def _grouped_forward(
    x_NI: jax.Array, weight: Quantized[jax.Array], sizes_X: jax.Array
) -> tuple[jax.Array, tuple[Quantized[jax.Array], jax.Array]]:
    return _grouped(x_NI, weight, sizes_X), (weight, sizes_X)


def _grouped_backward(
    kept: tuple[Quantized[jax.Array], jax.Array], gradient_NO: jax.Array
) -> tuple[jax.Array, None, None]:
    """Return the gradient of `x_NI`. The matrices are dequantized again, as in `_contract_backward`."""
    weight, sizes_X = kept
    matrices_XOI = _matrices(weight, gradient_NO.dtype).swapaxes(1, 2)
    return jax.lax.ragged_dot(gradient_NO, matrices_XOI, sizes_X), None, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _matrices(weight: Quantized[jax.Array], dtype: Any) -> jax.Array:
    """Return the matrices of the experts of one layer, [X, I, O]. Each device may have a part of I or O."""
    experts, *_, outputs = weight.codes.shape
    dense = values(weight.codes, weight.kind) * weight.scales[..., None, :]
    return dense.astype(dtype).reshape(experts, -1, outputs)


def values(codes: jax.Array, kind: str) -> jax.Array:
    """Return the values of the codes before scaling, float32 [..., N, codes per block, O].

    The largest magnitude of a block has the value `LARGEST`.
    """
    if kind == "int8":
        return codes.astype(jnp.float32)
    nibbles = jnp.concatenate((codes & jnp.uint8(15), codes >> jnp.uint8(4)), axis=-2)
    return nibbles.astype(jnp.float32) - 8.0 if kind == "int4" else _chosen(nibbles)


def _chosen(nibbles: jax.Array) -> jax.Array:
    """Return the NF4 values of the codes. Selects by each bit are used, because a gather is slow on a TPU."""
    level: list[Any] = [jnp.float32(value) for value in NF4]
    for bit in range(4):
        is_set = (nibbles & jnp.uint8(1 << bit)) != 0
        level = [jnp.where(is_set, high, low) for low, high in zip(level[::2], level[1::2], strict=True)]
    chosen: jax.Array = level[0]
    return chosen


def quantized(dense: jax.Array, like: Quantized[Any]) -> Quantized[jax.Array]:
    """Return `dense` quantized to the nearest codes, with the kind and block size of `like`; layers may come first."""
    lead = dense.shape[: dense.ndim - len(like.shape)]
    blocks, width = like.codes.shape[-3], like.codes.shape[-2] * (1 if like.kind == "int8" else 2)
    wide = dense.astype(jnp.float32).reshape(*lead, blocks, width, -1)
    scales = jnp.max(jnp.abs(wide), axis=-2) / LARGEST[like.kind]
    unit = wide / jnp.where(scales == 0, 1.0, scales)[..., None, :]
    return replace(like, codes=_packed(unit, like.kind), scales=scales)


def _packed(unit: jax.Array, kind: str) -> jax.Array:
    if kind == "int8":
        return jnp.round(unit).astype(jnp.int8)
    if kind == "int4":
        nibbles = (jnp.round(unit) + 8.0).astype(jnp.uint8)
    else:
        middles = [(low + high) / 2 for low, high in pairwise(NF4)]
        nibbles = sum((unit > jnp.float32(m)).astype(jnp.uint8) for m in middles)
    low, high = jnp.split(nibbles, 2, axis=-2)
    return low | (high << jnp.uint8(4))


def quantized_spec(spec: ParamSpec, kind: str, block: int, share: float | None = None) -> Quantized[ParamSpec]:
    """Return the quantized form of a dense spec.

    Args:
        spec: The dense spec; layers and experts may come first.
        kind: The type of the codes.
        block: The number of inputs that share a scale. It must divide the number of inputs.
        share: The share of the experts that each token uses; None for a matrix that is not of experts.
    """
    lead = spec.lead
    shape, axes = spec.shape[lead:], spec.axes[lead:]
    ins, outs = math.prod(shape[: spec.inputs]), math.prod(shape[spec.inputs :])
    width = block if kind == "int8" else block // 2
    layer = spec.axes[:lead]

    def made(sizes: tuple[int, ...], dtype: Any, *, codes: bool) -> ParamSpec:
        letters = layer + _letters(axes, spec.inputs, codes=codes)
        whole = (*spec.shape[:lead], *sizes)
        return replace(spec, shape=whole, axes=letters, init=Fill(0), dtype=dtype, decay=False, inputs=1)

    return Quantized(
        codes=made((ins // block, width, outs), jnp.int8 if kind == "int8" else jnp.uint8, codes=True),
        scales=made((ins // block, outs), jnp.float32, codes=False),
        kind=kind,
        shape=shape,
        axes=axes,
        inputs=spec.inputs,
        share=share,
    )


def array_letters(weight: Quantized[Any]) -> tuple[str, str]:
    """Return the letters of the codes and of the scales, without those of layers and experts."""
    return _letters(weight.axes, weight.inputs, codes=True), _letters(weight.axes, weight.inputs, codes=False)


def _letters(axes: str, inputs: int, *, codes: bool) -> str:
    """Return the letters of the codes or scales, which decide their sharding.

    Blocks are split as the first input dimension, outputs as the first output dimension. A block is never split.
    """
    return axes[0] + ("b" if codes else "") + axes[inputs]
