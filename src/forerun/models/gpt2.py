"""GPT-2, with learned positions, LayerNorm and biases.

Letters: B batch, S sequence, T new tokens, E embed, F mlp, H heads, D head, V vocab, P positions, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax

from forerun.models.base import Capabilities, Readout
from forerun.models.decoder_config import Gpt2Config
from forerun.models.keys import Stack
from forerun.models.layout import per_layer, per_layer_with_outputs, unstacked
from forerun.nn import layers
from forerun.nn.attention import attention, cached_attention
from forerun.nn.compute import Compute, residual
from forerun.nn.kv_cache import Cache
from forerun.nn.sharding import constrain
from forerun.nn.spec import Fill, Normal, ParamSpec, count, stack
from forerun.nn.weights.dense import Dense, as_weight, contract

T = TypeVar("T")
Carry = tuple[jax.Array, jax.Array | int]  # the residual stream and the number of the layer
NewTokens = tuple[jax.Array, jax.Array]  # keys and values of one layer, [B, T, H, D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Gpt2Block(Generic[T]):
    """Parameters of one layer."""

    attention_norm: T
    attention_norm_bias: T
    query: Dense[T]
    key: Dense[T]
    value: Dense[T]
    out: Dense[T]
    query_bias: T
    key_bias: T
    value_bias: T
    out_bias: T
    mlp_norm: T
    mlp_norm_bias: T
    up: Dense[T]
    up_bias: T
    down: Dense[T]
    down_bias: T


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gpt2Params(Generic[T]):
    """Parameters of GPT-2."""

    embed: T
    positions: T
    blocks: Gpt2Block[T]  # stacked layers: every leaf has a leading L
    norm: T
    norm_bias: T


@dataclass(frozen=True)
class Gpt2:
    """A GPT-2 model."""

    config: Gpt2Config

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def heads(self) -> int:
        return self.config.heads

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(layers=self.config.layers, positions=self.config.positions, has_cache=True)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return (Stack("blocks", tuple(range(self.config.layers))),)

    def specs(self) -> Gpt2Params[ParamSpec]:
        c = self.config
        return Gpt2Params(
            embed=ParamSpec((c.vocab, c.embed), "VE", Normal(0.02)),
            positions=ParamSpec((c.positions, c.embed), "PE", Normal(0.01)),
            blocks=stack(_block_specs(c), c.layers),
            norm=_fill((c.embed,), "E", 1.0),
            norm_bias=_fill((c.embed,), "E", 0.0),
        )

    def apply(
        self,
        params: Gpt2Params[jax.Array],
        tokens_BS: jax.Array,
        segments_BS: jax.Array,
        positions_BS: jax.Array,
        compute: Compute,
    ) -> Readout:
        attend = partial(attention, segments_BS=segments_BS, window=None, kernel=compute.attention)

        def layer(x_BSE: jax.Array, block: Gpt2Block[jax.Array]) -> jax.Array:
            return self.block(block, x_BSE, attend)[0]

        x_BSE = self._embed(params, tokens_BS, positions_BS, compute)
        x_BSE = per_layer([compute.checkpointed(layer)], x_BSE, params.blocks, unroll=compute.unroll)
        return self._readout(params, x_BSE, compute)

    def unstacked(self, params: Gpt2Params[jax.Array]) -> Gpt2Params[jax.Array]:
        """Return `params` with separate layers, for `extend` on a CPU. The arrays of `params` are deleted."""
        unstacked_params: Gpt2Params[jax.Array] = unstacked(params, self.stacks)
        return unstacked_params

    def cache(self, rows: int, length: int, dtype: Any) -> Cache[ParamSpec]:
        """Return the specs of a key/value cache for `rows` texts of up to `length` tokens."""
        c = self.config
        return Cache.specs(c.layers, rows, length, c.heads, c.head_dim, dtype)

    def extend(
        self,
        params: Gpt2Params[jax.Array],
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Cache[jax.Array],
        compute: Compute,
    ) -> tuple[Readout, Cache[jax.Array]]:
        """Compute new tokens of each row, and return their read-out and the cache with their keys and values.

        `positions_BT` is consecutive in each row; padding at the end of a row repeats its last position.
        """

        def layer(carry: Carry, block: Gpt2Block[jax.Array]) -> tuple[Carry, NewTokens]:
            x_BTE, number = carry

            def attend(q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
                return cached_attention(q_BTHD, k_BTHD, v_BTHD, cache.layer(number), positions_BT, window=None)

            x_BTE, new = self.block(block, x_BTE, attend)
            return (x_BTE, number + 1), new

        start = (self._embed(params, tokens_BT, positions_BT, compute), 0)
        (x_BTE, _), new = per_layer_with_outputs([layer], start, params.blocks)
        return self._readout(params, x_BTE, compute), cache.with_tokens(positions_BT, *new, after_BTE=x_BTE)

    def block(
        self,
        block: Gpt2Block[jax.Array],
        x_BSE: jax.Array,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> tuple[jax.Array, NewTokens]:
        """Return the output of one layer, [B, S, E], and its keys and values. `block` has no layer dimension."""
        c = self.config
        x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")

        y_BSE = layers.layer_norm(x_BSE, block.attention_norm, block.attention_norm_bias, c.norm_eps)
        q_BSHD = residual(_biased("BSE,EHD->BSHD", y_BSE, block.query, block.query_bias), "query")
        k_BSHD = residual(_biased("BSE,EHD->BSHD", y_BSE, block.key, block.key_bias), "key")
        v_BSHD = residual(_biased("BSE,EHD->BSHD", y_BSE, block.value, block.value_bias), "value")
        y_BSHD = constrain(attend(q_BSHD, k_BSHD, v_BSHD), "BSHD")
        x_BSE = x_BSE + _biased("BSHD,HDE->BSE", y_BSHD, block.out, block.out_bias)

        y_BSE = layers.layer_norm(x_BSE, block.mlp_norm, block.mlp_norm_bias, c.norm_eps)
        up_BSF = residual(_biased("BSE,EF->BSF", y_BSE, block.up, block.up_bias), "mlp_up")
        down_BSE = _biased("BSF,FE->BSE", jax.nn.gelu(up_BSF, approximate=True), block.down, block.down_bias)
        return x_BSE + down_BSE, (k_BSHD, v_BSHD)

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs per token of a forward and backward pass.

        Counts 6 per matrix element (the tied embedding once), and 12 x E x S/2 per layer for causal attention.
        """
        c = self.config
        matrices = count([leaf for leaf in jax.tree.leaves(self.specs()) if leaf.decay]) - c.positions * c.embed
        return 6.0 * matrices + 12.0 * c.layers * c.embed * sequence / 2

    def _embed(
        self, params: Gpt2Params[jax.Array], tokens_BS: jax.Array, positions_BS: jax.Array, compute: Compute
    ) -> jax.Array:
        x_BSE = layers.embed(params.embed, tokens_BS, compute.dtype)
        return x_BSE + layers.embed(params.positions, positions_BS, compute.dtype)

    def _readout(self, params: Gpt2Params[jax.Array], x_BSE: jax.Array, compute: Compute) -> Readout:
        x_BSE = layers.layer_norm(x_BSE, params.norm, params.norm_bias, self.config.norm_eps)
        return Readout(x_BSE, as_weight(params.embed).matrix("VE", compute.dtype))


def _biased(equation: str, x: jax.Array, weight: Dense[jax.Array], bias: jax.Array) -> jax.Array:
    y = contract(equation, x, weight)
    return y + bias.astype(y.dtype)


def _block_specs(c: Gpt2Config) -> Gpt2Block[ParamSpec]:
    E, H, D, F = c.embed, c.heads, c.head_dim, c.mlp
    into = Normal(0.02)
    back = Normal(0.02 / (2 * c.layers) ** 0.5)  # 2 x layers outputs add up in the residual stream

    def projection() -> Dense[ParamSpec]:
        return Dense(ParamSpec((E, H, D), "EHD", into))

    return Gpt2Block(
        attention_norm=_fill((E,), "E", 1.0),
        attention_norm_bias=_fill((E,), "E", 0.0),
        query=projection(),
        key=projection(),
        value=projection(),
        out=Dense(ParamSpec((H, D, E), "HDE", back, inputs=2)),
        query_bias=_fill((H, D), "HD", 0.0),
        key_bias=_fill((H, D), "HD", 0.0),
        value_bias=_fill((H, D), "HD", 0.0),
        out_bias=_fill((E,), "E", 0.0),
        mlp_norm=_fill((E,), "E", 1.0),
        mlp_norm_bias=_fill((E,), "E", 0.0),
        up=Dense(ParamSpec((E, F), "EF", into)),
        up_bias=_fill((F,), "F", 0.0),
        down=Dense(ParamSpec((F, E), "FE", back)),
        down_bias=_fill((E,), "E", 0.0),
    )


def _fill(shape: tuple[int, ...], axes: str, value: float) -> ParamSpec:
    return ParamSpec(shape, axes, Fill(value), decay=False)
