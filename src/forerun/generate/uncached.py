"""Generation with a model that has only `apply`: its cache is the text, which is read again for every token.

B rows, T new tokens, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.models.base import Capabilities, Model, Readout, capabilities_of
from forerun.nn.compute import Compute
from forerun.nn.spec import Fill, ParamSpec, Tree


@dataclass(frozen=True)
class UncachedModel:
    """A wrapper that adds `cache` and `extend` to a model. The cost of a token grows with the text before it.

    The model is causal, so values after the last token of a row have no effect.
    """

    model: Model

    @property
    def vocab(self) -> int:
        return self.model.vocab

    @property
    def heads(self) -> int | None:
        return self.model.heads

    @property
    def capabilities(self) -> Capabilities:
        return replace(capabilities_of(self.model), has_cache=True)

    def specs(self) -> Tree:
        return self.model.specs()

    def apply(
        self, params: Any, tokens_BS: jax.Array, segments_BS: jax.Array, positions_BS: jax.Array, compute: Compute
    ) -> Readout:
        return self.model.apply(params, tokens_BS, segments_BS, positions_BS, compute)

    def flops_per_token(self, sequence: int) -> float:
        return self.model.flops_per_token(sequence)

    def cache(self, rows: int, length: int, dtype: Any) -> ParamSpec:
        """Return the spec of the tokens so far. A token's index is its position, as in `forerun.nn.kv_cache`."""
        return ParamSpec((rows, length), "BT", Fill(0.0), jnp.int32)  # not the letter S, which tp would split

    def extend(
        self, params: Any, tokens_BT: jax.Array, positions_BT: jax.Array, cache: jax.Array, compute: Compute
    ) -> tuple[Readout, jax.Array]:
        """Return the read-out at the new tokens, and the text including them."""

        def put(old_S: jax.Array, new_T: jax.Array, place: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(old_S, new_T, (place,))

        text_BS = jax.vmap(put)(cache, tokens_BT, positions_BT[:, 0])
        everywhere_BS = jnp.broadcast_to(jnp.arange(text_BS.shape[1], dtype=jnp.int32), text_BS.shape)
        out = self.model.apply(params, text_BS, jnp.ones_like(text_BS), everywhere_BS, compute)
        hidden_BTE = jnp.take_along_axis(out.hidden_BSE, positions_BT[..., None], axis=1)
        return replace(out, hidden_BSE=hidden_BTE), text_BS
