"""The cache of keys and values for generation.

L layers, B rows, K kv heads, S cache slots, T new tokens, D head. A token's slot is its position. A shorter row needs
no padding mask, because the slots after its last token are written before they are read.

All layers of a step read the old cache, and one write after the last layer adds the new tokens. If the cache were the
carry of the scan over layers, XLA would copy it for every token. Keys and values are one array each, or a tuple
with one array per layer (`apart`). A CPU reads the tuple without first copying a layer out of the stacked array.
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
STACKED = "LBKSD"  # heads before slots: both products of the attention read it without a transpose
# Separate arrays are for CPUs. A CPU multiplies by a matrix faster if the summed dimension is not the last one.
KEYS, VALUES = "BKDS", "BKSD"


class CachedLayer(NamedTuple):
    """Keys and values of one layer."""

    keys: jax.Array  # axes as in `key_axes`
    values: jax.Array  # [B, K, S, D]
    key_axes: str = VALUES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache(Generic[T]):
    """Keys and values of all layers, stacked or with an array for each layer."""

    keys: T | tuple[T, ...]  # [L, B, K, S, D], or L times [B, K, D, S]
    values: T | tuple[T, ...]  # [L, B, K, S, D], or L times [B, K, S, D]

    @staticmethod
    def specs(layers: int, rows: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> Cache[ParamSpec]:
        """Return the specs of a stacked cache."""
        one = ParamSpec((layers, rows, kv_heads, length, head_dim), STACKED, Fill(0.0), dtype)
        return Cache(one, one)

    def apart(self: Cache[ParamSpec]) -> Cache[ParamSpec]:
        """Return the specs of the same cache with an array for each layer."""

        def each(stacked: ParamSpec | tuple[ParamSpec, ...], axes: str) -> tuple[ParamSpec, ...]:
            if isinstance(stacked, tuple):
                return stacked
            sizes = dict(zip(stacked.axes, stacked.shape, strict=True))
            return (replace(stacked, shape=tuple(sizes[axis] for axis in axes), axes=axes),) * sizes["L"]

        return Cache(each(self.keys, KEYS), each(self.values, VALUES))

    @property
    def slots(self: Cache[jax.Array]) -> int:
        """The number of positions that each row can have."""
        values: jax.Array = self.values[0] if isinstance(self.values, tuple) else self.values
        return values.shape[-2]

    def layer(self: Cache[jax.Array], number: jax.Array | int) -> CachedLayer:
        """Return keys and values of one layer. With an array for each layer, `number` must be a Python int."""
        if isinstance(self.keys, tuple) and isinstance(self.values, tuple):
            assert isinstance(number, int)
            return CachedLayer(self.keys[number], self.values[number], KEYS)
        return CachedLayer(*(jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in (self.keys, self.values)))

    def with_tokens(
        self: Cache[jax.Array], positions_BT: jax.Array, k_LBTKD: Any, v_LBTKD: Any, *, after_BTE: jax.Array
    ) -> Cache[jax.Array]:
        """Return the cache with the keys and values of new tokens written in all layers.

        A cache without slots becomes one with a slot for each new token; the first token is then at position 0.

        Args:
            positions_BT: Positions of the new tokens. Only the first of each row is used: slots are consecutive.
            k_LBTKD: New keys, stacked or in a tuple, as in the cache.
            v_LBTKD: New values, stacked or in a tuple, as in the cache.
            after_BTE: The output of the last layer. The slots depend on it, so the compiler cannot write before all
                layers have read the old cache. Otherwise it would copy the cache first.
        """
        layers = len(self.keys) if isinstance(self.keys, tuple) else 0
        axes = [KEYS] * layers + [VALUES] * layers if layers else [STACKED, STACKED]
        old, structure = jax.tree.flatten(self)
        given = jax.tree.leaves((k_LBTKD, v_LBTKD))
        new = [_arranged(x, names).astype(array.dtype) for x, array, names in zip(given, old, axes, strict=True)]
        if old[0].size == 0:
            return cast(Cache[jax.Array], jax.tree.unflatten(structure, new))
        # The dependency on `after_BTE`. A row of NaN is written to slot 0, which is harmless. An
        # `optimization_barrier` does not help: XLA for CPUs removes it before it decides whether to copy.
        first_B = jnp.where(jnp.isnan(after_BTE[:, 0, 0]), 0, positions_BT[:, 0])
        # Every device writes its own rows and heads; the slots of a row are never split.
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
    """Return the cache arrays with new tokens written from slot `first_B` of each row.

    A loop writes one row after the other, in place. With `vmap` the write would be a scatter, which copies the cache.
    """

    def row(number: jax.Array | int, arrays: list[jax.Array]) -> list[jax.Array]:
        def put(array: jax.Array, tokens: jax.Array, names: str) -> jax.Array:
            own = jax.lax.dynamic_slice_in_dim(tokens, number, 1, axis=names.index("B"))
            starts = {"B": number, "S": first_B[number]}
            return jax.lax.dynamic_update_slice(array, own, [starts.get(axis, 0) for axis in names])

        return [put(array, tokens, names) for array, tokens, names in zip(arrays, new, axes, strict=True)]

    rows = first_B.shape[0]
    return row(0, old) if rows == 1 else jax.lax.fori_loop(0, rows, row, old)


# ---- Caches for generation of models whose layers have different shapes ----
#
# Every shape of layers has its own part: keys and values of attention layers (`kv_cache.Cache`), or states of recurrent
# layers (`RecurrentCache`), which do not grow with the text.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache(Generic[T]):
    """States of all layers of one shape, by name: stacked, or with an array for each layer."""

    states: dict[str, T | tuple[T, ...]]  # axes "LB...", or L times "B..."

    def apart(self: RecurrentCache[ParamSpec]) -> RecurrentCache[ParamSpec]:
        """Return the specs of the same cache with an array for each layer."""

        def each(stacked: ParamSpec | tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
            if isinstance(stacked, tuple):
                return stacked
            return (replace(stacked, shape=stacked.shape[1:], axes=stacked.axes[1:]),) * stacked.shape[0]

        return RecurrentCache({name: each(state) for name, state in self.states.items()})

    def layer(self: RecurrentCache[jax.Array], number: jax.Array | int) -> dict[str, jax.Array]:
        """Return the states of one layer. With an array for each layer, `number` must be a Python int."""

        def one(state: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
            if isinstance(state, tuple):
                assert isinstance(number, int)
                return state[number]
            return jax.lax.dynamic_index_in_dim(state, number, keepdims=False)

        return {name: one(state) for name, state in self.states.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCaches(Generic[T]):
    """The caches of all shapes of layers, by the name of the shape. A shape without own keys and states has none."""

    parts: dict[str, Cache[T] | RecurrentCache[T]]

    def apart(self: LayerCaches[ParamSpec]) -> LayerCaches[ParamSpec]:
        """Return the specs of the same caches with an array for each layer."""
        return LayerCaches({name: part.apart() for name, part in self.parts.items()})

    @property
    def slots(self: LayerCaches[jax.Array]) -> int:
        """The number of positions that each row can have, or 0 without attention layers."""
        return max((part.slots for part in self.parts.values() if isinstance(part, Cache)), default=0)

    def with_tokens(
        self: LayerCaches[jax.Array], positions_BT: jax.Array, new: dict[str, Any], *, after_BTE: jax.Array
    ) -> LayerCaches[jax.Array]:
        """Return the caches after new tokens.

        Args:
            positions_BT: Positions of the new tokens.
            new: For each shape the new keys and values, or the states after the new tokens, stacked or in tuples.
            after_BTE: The output of the last layer. See `Cache.with_tokens`.
        """

        def updated(name: str, part: Cache[jax.Array] | RecurrentCache[jax.Array]) -> Any:
            if isinstance(part, Cache):
                return part.with_tokens(positions_BT, *new[name], after_BTE=after_BTE)
            return RecurrentCache(new[name])

        return LayerCaches({name: updated(name, part) for name, part in self.parts.items()})
