"""Experts with or without adapters: their products with groups of rows, and the letters of their arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from forerun.nn.grouped_matmul import grouped_matmul
from forerun.nn.weights.experts import Experts
from forerun.nn.weights.lowrank import LowRank


def is_experts(weight: object) -> bool:
    """Return whether a weight is one matrix per expert, with or without an adapter."""
    return isinstance(weight, Experts) or (isinstance(weight, LowRank) and is_experts(weight.base))


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
    return replace(weight, value=axes)
