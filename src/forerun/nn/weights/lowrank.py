"""Weights with a low-rank adapter (LoRA, DoRA): W + scale x (down @ up), with W frozen.

I input dimensions, O output dimensions, R rank. DoRA also learns a length for every output: the column of the sum
keeps its direction and gets this length. Dropout applies only to the input of the adapter.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.nn import sharding
from forerun.nn.spec import Tree
from forerun.nn.weights.dense import Dense, Extended, Weight, is_weight, map_weights
from forerun.nn.weights.experts import Experts, grouped_matmul
from forerun.nn.weights.quantized import Quantized, array_letters

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LowRank(Generic[T]):
    """A frozen weight with a low-rank adapter."""

    base: Weight
    down: T  # [I..., R]
    up: T  # [R, O...]
    length: T | None = None  # [O...]: lengths of DoRA
    noise: T | None = None  # the dropout key of one training step (see `noisy`); None: no dropout
    inputs: int = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    dropout: float = field(default=0.0, metadata={"static": True})

    def matrix(self: LowRank[jax.Array], axes: str, dtype: Any) -> jax.Array:
        whole = self.base.matrix(axes, jnp.float32) + self._delta(jnp.float32)
        return (whole if self.length is None else whole * self._stretch(whole)).astype(dtype)

    def contract(self: LowRank[jax.Array], equation: str, x: jax.Array) -> jax.Array:
        sides, out = equation.split("->")
        given, axes = sides.split(",")
        ins, outs = axes[: self.inputs], axes[self.inputs :]
        kept = "".join(letter for letter in given if letter not in ins)
        down = sharding.gather(self.down.astype(x.dtype), f"{ins}R")
        up = sharding.gather((self.scale * self.up).astype(x.dtype), f"R{outs}")
        low = jnp.einsum(f"{given},{ins}R->{kept}R", self._dropped(x), down)
        y = jnp.einsum(f"{kept}R,R{outs}->{out}", low, up)
        y = self.base.contract(equation, x) + y
        if self.length is None:
            return y
        stretch = self._stretch(self.base.matrix(axes, jnp.float32) + self._delta(jnp.float32))
        return y * stretch.reshape(stretch.shape[self.inputs :]).astype(y.dtype)

    def grouped(self: LowRank[jax.Array], x_NI: jax.Array, sizes_X: jax.Array) -> jax.Array:
        """Return each row multiplied by the matrix of its expert and by the adapter of this matrix, [N, O].

        The product with the adapter has two grouped matmuls of the adapter's rank.
        """
        low_NR = grouped_matmul(x_NI, self.down.astype(x_NI.dtype), sizes_X)
        more_NO = grouped_matmul(low_NR, (self.scale * self.up).astype(x_NI.dtype), sizes_X)
        base: Any = self.base
        product_NO: jax.Array = base.grouped(x_NI, sizes_X)
        return product_NO + more_NO

    def _delta(self: LowRank[jax.Array], dtype: Any) -> jax.Array:
        """Return scale x (down @ up) in the shape of the base; layers may come first."""
        lead = self.down.shape[: self.down.ndim - 1 - self.inputs]
        ranks = self.down.shape[-1]
        ins, outs = self.down.shape[len(lead) : -1], self.up.shape[len(lead) + 1 :]
        down = self.down.reshape(*lead, -1, ranks).astype(dtype)
        up = self.up.reshape(*lead, ranks, -1).astype(dtype)
        product = jnp.matmul(down, up, precision=jax.lax.Precision.HIGHEST)
        return jnp.asarray(self.scale, dtype) * product.reshape(*lead, *ins, *outs)

    def _stretch(self: LowRank[jax.Array], whole: jax.Array) -> jax.Array:
        """Return the factor that gives every output its length, [1..., O...].

        The norm is treated as a constant in the backward pass, as in the DoRA paper.
        """
        assert self.length is not None
        lead = self.down.ndim - 1 - self.inputs
        norm = jax.lax.stop_gradient(norms(whole, self.inputs, lead))
        return jnp.expand_dims(self.length.astype(whole.dtype), range(lead, lead + self.inputs)) / norm

    def _dropped(self: LowRank[jax.Array], x: jax.Array) -> jax.Array:
        if self.noise is None or not self.dropout:
            return x
        kept = jax.random.bernoulli(jax.random.wrap_key_data(self.noise), 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), jnp.zeros((), x.dtype)).astype(x.dtype)


def norms(matrix: jax.Array, inputs: int, lead: int) -> jax.Array:
    """Return the norm of every output's column. Input dimensions are kept with size 1."""
    return jnp.sqrt(jnp.sum(jnp.square(matrix), axis=tuple(range(lead, lead + inputs)), keepdims=True))


def bare(params: Tree) -> Tree:
    """Return the parameters of the base model, without adapters. New rows of an embedding are part of its table."""

    def leaf(weight: Any) -> Any:
        if isinstance(weight, Extended):
            return _table(weight, weight.rows.dtype)
        return weight.base if isinstance(weight, LowRank) else weight

    return map_weights(leaf, params)


def noisy(params: Tree, key: jax.Array) -> Tree:
    """Return the parameters with a dropout key in every adapter that uses dropout, one key per layer."""

    def leaf(path: Any, weight: Any) -> Any:
        if not isinstance(weight, LowRank) or not weight.dropout:
            return weight
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        lead = weight.down.shape[: weight.down.ndim - 1 - weight.inputs]
        keys = jax.random.split(own, lead) if lead else own
        return replace(weight, noise=jax.random.key_data(keys))

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_weight)


def plain(params: Tree, dtype: Any) -> Tree:
    """Return the parameters with every weight as one array in `dtype`. Weights that are one array already stay."""

    def leaf(weight: Any) -> Any:
        if isinstance(weight, Extended):
            return _table(weight, dtype)
        if isinstance(weight, Dense | Experts):
            return weight
        share = expert_share(weight)
        whole = weight.matrix("", dtype)
        return Dense(whole) if share is None else Experts(value=whole, share=share)

    return map_weights(leaf, params)


def expert_share(weight: object) -> float | None:
    """Return the share of the experts that each token uses, or None for a weight that is not one matrix per expert."""
    if isinstance(weight, LowRank):
        return expert_share(weight.base)
    return weight.share if isinstance(weight, Experts | Quantized) else None


def _table(weight: Extended[jax.Array], dtype: Any) -> Any:
    """Return the complete table in `dtype`, as an array for an embedding and as a dense weight for a read-out."""
    whole = weight.matrix("", dtype)
    return whole if weight.is_embedding else Dense(whole)


# ---- Experts with or without adapters, dense or quantized ----


def is_experts(weight: object) -> bool:
    """Return whether a weight is one matrix per expert, with or without an adapter."""
    return expert_share(weight) is not None


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
