"""Experts with or without adapters, dense or quantized: their products with groups of rows, and letters of arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from forerun.nn.grouped_matmul import grouped_matmul
from forerun.nn.weights.lowrank import LowRank, expert_share
from forerun.nn.weights.quantized import Quantized, array_letters


def is_experts(weight: object) -> bool:
    """Return whether a weight is one matrix per expert, with or without an adapter."""
    return expert_share(weight) is not None


def grouped(x_NI: jax.Array, weight: Any, sizes_X: jax.Array) -> jax.Array:
    """Return each row multiplied by the matrix of its expert and by the adapter of this matrix, [N, O].

    The product with the adapter has two grouped matmuls of the adapter's rank.
    """
    if not isinstance(weight, LowRank):
        made: jax.Array = weight.grouped(x_NI, sizes_X)
        return made
    low_NR = grouped_matmul(x_NI, weight.down.astype(x_NI.dtype), sizes_X)
    more_NO = grouped_matmul(low_NR, (weight.scale * weight.up).astype(x_NI.dtype), sizes_X)
    return grouped(x_NI, weight.base, sizes_X) + more_NO


def array_axes(weight: Any, axes: str) -> Any:
    """Return the weight with the letters of each of its arrays in place of the array. `axes` has no layers."""
    if isinstance(weight, LowRank):
        return replace(weight, base=array_axes(weight.base, axes), down=f"{axes[:2]}R", up=f"{axes[0]}R{axes[2]}")
    if isinstance(weight, Quantized):
        codes, scales = array_letters(weight)
        return replace(weight, codes=axes[0] + codes, scales=axes[0] + scales)
    return replace(weight, value=axes)


def cast(weight: Any, dtype: Any) -> Any:
    """Return the weight with floats in the compute dtype, so that fewer bytes are gathered.

    Quantized matrices stay, because their scales are float32 numbers.
    """
    return jax.tree.map(
        lambda one: one if isinstance(one, Quantized) else one.astype(dtype),
        weight,
        is_leaf=lambda one: isinstance(one, Quantized),
    )
