"""Keys and values of the tokens so far, for writing text. L layers, B rows, S places, K kv heads, D head.

A token's place is its position, so a row that is shorter than its neighbours needs no padding mask: what lies behind
its last token is overwritten before it is ever seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

from forerun.nn.spec import Fill, ParamSpec

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache(Generic[T]):
    keys: T  # [L, B, S, K, D]
    values: T

    @staticmethod
    def specs(layers: int, rows: int, length: int, kv_heads: int, head_dim: int, dtype: Any) -> Cache[ParamSpec]:
        one = ParamSpec((layers, rows, length, kv_heads, head_dim), "LBSKD", Fill(0.0), dtype)
        return Cache(one, one)

    def layer(self: Cache[jax.Array], number: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, values = (jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for x in (self.keys, self.values))
        return keys, values

    def with_tokens(
        self: Cache[jax.Array], number: jax.Array, positions_BT: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array
    ) -> Cache[jax.Array]:
        """Each row's tokens put at their own places in one layer; the places of a row are consecutive."""

        def put(all_layers: jax.Array, new_BTKD: jax.Array) -> jax.Array:
            def row(cache_LSKD: jax.Array, new_TKD: jax.Array, place: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice(
                    cache_LSKD, new_TKD[None].astype(cache_LSKD.dtype), (number, place, 0, 0)
                )

            return jax.vmap(row, in_axes=(1, 0, 0), out_axes=1)(all_layers, new_BTKD, positions_BT[:, 0])

        return Cache(put(self.keys, k_BTKD), put(self.values, v_BTKD))
