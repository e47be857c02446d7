"""Keep the keys and values of the tokens so far, for generation.

L layers, B rows, K kv heads, S places, T new tokens, D head. A token's place is its position, so a shorter row
needs no padding mask: the places after its last token are written before they are read.

All layers of a step read the cache, and it is written once, after the last of them. As the carry of a scan over the
layers the whole cache would be copied for every token. Keys and values are one array each, or a tuple
of one array per layer (`apart`), which a CPU reads without first copying a layer out of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from forerun.nn import sharding
from forerun.nn.spec import Fill, ParamSpec

T = TypeVar("T")
AXES = "LBKSD"  # heads before places: both products of the attention read it without a transpose


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache(Generic[T]):
    keys: T | tuple[T, ...]  # [L, B, K, S, D], or L times [B, K, S, D]
    values: T | tuple[T, ...]

    @staticmethod
    def specs(layers: int, rows: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> Cache[ParamSpec]:
        one = ParamSpec((layers, rows, kv_heads, length, head_dim), AXES, Fill(0.0), dtype)
        return Cache(one, one)

    def apart(self: Cache[ParamSpec]) -> Cache[ParamSpec]:
        """Describe the same cache with an array for each layer."""

        def each(stacked: ParamSpec | tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
            if isinstance(stacked, tuple):
                return stacked
            return (replace(stacked, shape=stacked.shape[1:], axes=stacked.axes[1:]),) * stacked.shape[0]

        return Cache(each(self.keys), each(self.values))

    def layer(self: Cache[jax.Array], number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Return keys and values of one layer, [B, K, S, D]. Layers that are apart have a plain number."""

        def one(layers: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
            if isinstance(layers, tuple):
                assert isinstance(number, int)
                return layers[number]
            return jax.lax.dynamic_index_in_dim(layers, number, keepdims=False)

        return one(self.keys), one(self.values)

    def with_tokens(
        self: Cache[jax.Array], positions_BT: jax.Array, k_LBTKD: Any, v_LBTKD: Any, *, after_BTE: jax.Array
    ) -> Cache[jax.Array]:
        """Put each row's tokens at their own places in all layers; the places of a row are consecutive.

        A cache without any place becomes one with a place for each new token, of which the first is at position 0.

        Args:
          k_LBTKD, v_LBTKD: stacked or in tuples, as the cache is.
          after_BTE: what the last layer returns. The places are made to depend on it (a row that is not a number goes
            to place 0, where it does no harm): a compiler that may write before the last layer has read the old cache
            copies the cache first, and XLA for CPUs drops `optimization_barrier` before it decides that.
        """
        old, structure = jax.tree.flatten(self)
        given = jax.tree.leaves((k_LBTKD, v_LBTKD))
        new = [jnp.swapaxes(x, -3, -2).astype(array.dtype) for x, array in zip(given, old, strict=True)]
        if old[0].shape[-2] == 0:
            return cast(Cache[jax.Array], jax.tree.unflatten(structure, new))
        first_B = jnp.where(jnp.isnan(after_BTE[:, 0, 0]), 0, positions_BT[:, 0])
        # Every device writes its own rows and heads; the places of a row are never split.
        sizes = sharding.ambient_sizes()
        specs = [sharding.partition(o.shape, AXES[-o.ndim :], sizes, sharding.ACTIVATIONS) for o in old]
        write = sharding.by_hand(_written, arguments=(specs, specs, PartitionSpec(specs[0][-4])), results=specs)
        return cast(Cache[jax.Array], jax.tree.unflatten(structure, write(old, new, first_B)))


def _written(old: list[jax.Array], new: list[jax.Array], first_B: jax.Array) -> list[jax.Array]:
    """Write one row after the other, in place. With `vmap` it would be a scatter, which copies the cache."""

    def row(number: jax.Array | int, arrays: list[jax.Array]) -> list[jax.Array]:
        def put(array: jax.Array, tokens: jax.Array) -> jax.Array:
            layers = (0,) * (array.ndim - 4)
            own = jax.lax.dynamic_slice_in_dim(tokens, number, 1, axis=len(layers))
            return jax.lax.dynamic_update_slice(array, own, (*layers, number, 0, first_B[number], 0))

        return [put(array, tokens) for array, tokens in zip(arrays, new, strict=True)]

    rows = first_B.shape[0]
    return row(0, old) if rows == 1 else jax.lax.fori_loop(0, rows, row, old)
