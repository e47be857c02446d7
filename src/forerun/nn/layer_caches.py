"""Caches for generation of models whose layers have different shapes.

Every shape of layers has its own part: keys and values of attention layers (`kv_cache.Cache`), or states of recurrent
layers (`RecurrentCache`), which do not grow with the text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax

from forerun.nn.kv_cache import Cache
from forerun.nn.spec import ParamSpec

T = TypeVar("T")


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
