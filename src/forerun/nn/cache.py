"""Keep the keys and values of the tokens so far, for generation.

L layers, B rows, K kv heads, S places, T new tokens, D head. A token's place is its position, so a shorter row
needs no padding mask: the places after its last token are written before they are read.

All layers of a step read the cache, and it is written once, after the last of them. As the carry of a scan over the
layers the whole cache would be copied for every token. Keys and values are one array each, or a tuple
of one array per layer (`apart`), which a CPU reads without first copying a layer out of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from forerun.nn import sharding
from forerun.nn.spec import Fill, ParamSpec

T = TypeVar("T")
STACKED = "LBKSD"  # heads before places: both products of the attention read it without a transpose
# Separate arrays are for CPUs, which multiply by a matrix faster if the dimension that is summed is not the last.
KEYS, VALUES = "BKDS", "BKSD"


class CachedLayer(NamedTuple):
    """Keys and values of one layer, [B, K, S, D]. `key_axes` is the order of the keys' axes if it differs."""

    keys: jax.Array
    values: jax.Array
    key_axes: str = VALUES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache(Generic[T]):
    """The keys and values of all layers, stacked or with an array for each layer."""

    keys: T | tuple[T, ...]  # [L, B, K, S, D], or L times [B, K, D, S]
    values: T | tuple[T, ...]  # [L, B, K, S, D], or L times [B, K, S, D]

    @staticmethod
    def specs(layers: int, rows: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> Cache[ParamSpec]:
        """Describe a stacked cache."""
        one = ParamSpec((layers, rows, kv_heads, length, head_dim), STACKED, Fill(0.0), dtype)
        return Cache(one, one)

    def apart(self: Cache[ParamSpec]) -> Cache[ParamSpec]:
        """Describe the same cache with an array for each layer."""

        def each(stacked: ParamSpec | tuple[ParamSpec, ...], axes: str) -> tuple[ParamSpec, ...]:
            if isinstance(stacked, tuple):
                return stacked
            sizes = dict(zip(stacked.axes, stacked.shape, strict=True))
            return (replace(stacked, shape=tuple(sizes[axis] for axis in axes), axes=axes),) * sizes["L"]

        return Cache(each(self.keys, KEYS), each(self.values, VALUES))

    def layer(self: Cache[jax.Array], number: jax.Array | int) -> CachedLayer:
        """Return keys and values of one layer. Layers that are apart have a plain number."""
        if isinstance(self.keys, tuple) and isinstance(self.values, tuple):
            assert isinstance(number, int)
            return CachedLayer(self.keys[number], self.values[number], KEYS)
        return CachedLayer(*(jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in (self.keys, self.values)))

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
        layers = len(self.keys) if isinstance(self.keys, tuple) else 0
        axes = [KEYS] * layers + [VALUES] * layers if layers else [STACKED, STACKED]
        old, structure = jax.tree.flatten(self)
        given = jax.tree.leaves((k_LBTKD, v_LBTKD))
        new = [_arranged(x, names).astype(array.dtype) for x, array, names in zip(given, old, axes, strict=True)]
        if old[0].size == 0:
            return cast(Cache[jax.Array], jax.tree.unflatten(structure, new))
        first_B = jnp.where(jnp.isnan(after_BTE[:, 0, 0]), 0, positions_BT[:, 0])
        # Every device writes its own rows and heads; the places of a row are never split.
        sizes = sharding.ambient_sizes()
        specs = [
            sharding.partition(o.shape, names, sizes, sharding.ACTIVATIONS) for o, names in zip(old, axes, strict=True)
        ]
        rows = PartitionSpec(specs[0][axes[0].index("B")])
        write = sharding.by_hand(partial(_written, axes), arguments=(specs, specs, rows), results=specs)
        return cast(Cache[jax.Array], jax.tree.unflatten(structure, write(old, new, first_B)))


def _arranged(tokens: jax.Array, axes: str) -> jax.Array:
    """Return new keys or values, [L, B, T, K, D] or [B, T, K, D], in the order of the cache's axes."""
    given = "LBSKD"[-tokens.ndim :]
    return jnp.transpose(tokens, [given.index(axis) for axis in axes])


def _written(axes: list[str], old: list[jax.Array], new: list[jax.Array], first_B: jax.Array) -> list[jax.Array]:
    """Write one row after the other, in place. With `vmap` it would be a scatter, which copies the cache."""

    def row(number: jax.Array | int, arrays: list[jax.Array]) -> list[jax.Array]:
        def put(array: jax.Array, tokens: jax.Array, names: str) -> jax.Array:
            own = jax.lax.dynamic_slice_in_dim(tokens, number, 1, axis=names.index("B"))
            starts = {"B": number, "S": first_B[number]}
            return jax.lax.dynamic_update_slice(array, own, [starts.get(axis, 0) for axis in names])

        return [put(array, tokens, names) for array, tokens, names in zip(arrays, new, axes, strict=True)]

    rows = first_B.shape[0]
    return row(0, old) if rows == 1 else jax.lax.fori_loop(0, rows, row, old)
