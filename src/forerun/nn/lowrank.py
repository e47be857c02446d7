"""A weight that learns through a small one beside it: W + scale x (down @ up), W at rest. LoRA and its kin.

I input dimensions, O output dimensions, R rank. DoRA adds a length for every output: the sum keeps its direction and
takes that length. Dropout is on the way into the small one, and only there.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.nn import sharding
from forerun.nn.spec import Tree
from forerun.nn.weights import Dense, Weight, is_weight, map_weights

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LowRank(Generic[T]):
    base: Weight
    down: T  # [I..., R]
    up: T  # [R, O...]
    length: T | None = None  # [O...]: DoRA's
    noise: T | None = None  # a key for dropout, put in for one step; without it nothing is dropped
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

    def _delta(self: LowRank[jax.Array], dtype: Any) -> jax.Array:
        """The small one multiplied out, in the shape of the base; layers may come first."""
        lead = self.down.shape[: self.down.ndim - 1 - self.inputs]
        ranks = self.down.shape[-1]
        ins, outs = self.down.shape[len(lead) : -1], self.up.shape[len(lead) + 1 :]
        down = self.down.reshape(*lead, -1, ranks).astype(dtype)
        up = self.up.reshape(*lead, ranks, -1).astype(dtype)
        product = jnp.matmul(down, up, precision=jax.lax.Precision.HIGHEST)
        return jnp.asarray(self.scale, dtype) * product.reshape(*lead, *ins, *outs)

    def _stretch(self: LowRank[jax.Array], whole: jax.Array) -> jax.Array:
        """What brings every output to its length, [1..., O...]. The norm is taken as a constant, as DoRA does."""
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
    """The length of every output's column, input dimensions kept as ones."""
    return jnp.sqrt(jnp.sum(jnp.square(matrix), axis=tuple(range(lead, lead + inputs)), keepdims=True))


def bare(params: Tree) -> Tree:
    """Without the adapters: the model that was there before."""
    return map_weights(lambda weight: weight.base if isinstance(weight, LowRank) else weight, params)


def noisy(params: Tree, key: jax.Array) -> Tree:
    """With a key in every adapter that drops something, one per layer."""

    def leaf(path: Any, weight: Any) -> Any:
        if not isinstance(weight, LowRank) or not weight.dropout:
            return weight
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        lead = weight.down.shape[: weight.down.ndim - 1 - weight.inputs]
        keys = jax.random.split(own, lead) if lead else own
        return replace(weight, noise=jax.random.key_data(keys))

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_weight)


def plain(params: Tree, dtype: Any) -> Tree:
    """Every weight as one matrix: what the model is without any method."""

    def leaf(weight: Any) -> Any:
        return weight if isinstance(weight, Dense) else Dense(weight.matrix("", dtype))

    return map_weights(leaf, params)
