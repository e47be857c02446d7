"""The decoder family: Llama, Qwen2, Qwen3, Mistral, SmolLM2 and free dimensions.

B batch, S sequence, E embed, F mlp, H heads, K kv heads, D head, V vocab, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

from forerun.models.base import Readout
from forerun.models.sizes import DecoderConfig
from forerun.nn import layers
from forerun.nn.attention import attention
from forerun.nn.compute import Compute, residual
from forerun.nn.sharding import constrain
from forerun.nn.spec import Fill, Normal, ParamSpec, count, stack
from forerun.nn.weights import Dense, contract

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block(Generic[T]):
    """One layer. What a family does not have is None, and no leaf."""

    attention_norm: T
    query: Dense[T]
    key: Dense[T]
    value: Dense[T]
    out: Dense[T]
    query_bias: T | None
    key_bias: T | None
    value_bias: T | None
    query_norm: T | None
    key_norm: T | None
    mlp_norm: T
    gate: Dense[T]
    up: Dense[T]
    down: Dense[T]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params(Generic[T]):
    embed: T
    blocks: Block[T]  # every leaf with a leading L
    norm: T
    head: Dense[T] | None  # None: the embedding is used again


@dataclass(frozen=True)
class Decoder:
    config: DecoderConfig

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def heads(self) -> int:
        return self.config.heads

    def specs(self) -> Params[ParamSpec]:
        c = self.config
        return Params(
            embed=ParamSpec((c.vocab, c.embed), "VE", Normal(0.02)),
            blocks=stack(_block_specs(c), c.layers),
            norm=_scale(c.embed, "E"),
            head=None if c.tied else Dense(ParamSpec((c.vocab, c.embed), "VE", Normal(0.02))),
        )

    def apply(
        self,
        params: Params[jax.Array],
        tokens_BS: jax.Array,
        segments_BS: jax.Array,
        positions_BS: jax.Array,
        compute: Compute,
    ) -> Readout:
        c = self.config
        angles = layers.rope_angles(positions_BS, layers.rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))

        def layer(x_BSE: jax.Array, block: Block[jax.Array]) -> tuple[jax.Array, None]:
            return self.block(block, x_BSE, segments_BS, angles, compute), None

        x_BSE = layers.embed(params.embed, tokens_BS, compute.dtype)
        x_BSE, _ = jax.lax.scan(compute.checkpointed(layer), x_BSE, params.blocks)
        x_BSE = layers.rms_norm(x_BSE, params.norm, c.norm_eps)
        return Readout(x_BSE, (params.head or Dense(params.embed)).matrix("VE", compute.dtype))

    def block(
        self,
        block: Block[jax.Array],
        x_BSE: jax.Array,
        segments_BS: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        compute: Compute,
    ) -> jax.Array:
        """One layer, without its layer dimension."""
        c = self.config
        x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")

        y_BSE = layers.rms_norm(x_BSE, block.attention_norm, c.norm_eps)
        q_BSHD = _project("BSE,EHD->BSHD", y_BSE, block.query, block.query_bias, block.query_norm, c.norm_eps)
        k_BSKD = _project("BSE,EKD->BSKD", y_BSE, block.key, block.key_bias, block.key_norm, c.norm_eps)
        v_BSKD = _project("BSE,EKD->BSKD", y_BSE, block.value, block.value_bias, None, c.norm_eps)
        q_BSHD = residual(layers.rope(q_BSHD, angles), "query")
        k_BSKD = residual(layers.rope(k_BSKD, angles), "key")
        v_BSKD = residual(v_BSKD, "value")
        y_BSHD = attention(q_BSHD, k_BSKD, v_BSKD, segments_BS, window=c.window, kernel=compute.attention)
        x_BSE = x_BSE + contract("BSHD,HDE->BSE", constrain(y_BSHD, "BSHD"), block.out)

        y_BSE = layers.rms_norm(x_BSE, block.mlp_norm, c.norm_eps)
        gate_BSF = residual(contract("BSE,EF->BSF", y_BSE, block.gate), "mlp_gate")
        up_BSF = residual(contract("BSE,EF->BSF", y_BSE, block.up), "mlp_up")
        return x_BSE + contract("BSF,FE->BSE", jax.nn.silu(gate_BSF) * up_BSF, block.down)

    def flops_per_token(self, sequence: int) -> float:
        """6 per weight that multiplies, and causal attention: 12 E_heads S/2 per layer."""
        c = self.config
        matrices = count([leaf for leaf in jax.tree.leaves(self.specs()) if leaf.decay]) - c.vocab * c.embed
        if c.tied:
            matrices += c.vocab * c.embed
        seen = sequence / 2 if c.window is None else _mean_window(sequence, c.window)
        return 6.0 * matrices + 12.0 * c.layers * c.heads * c.head_dim * seen


def _mean_window(sequence: int, window: int) -> float:
    """Positions seen on average under a sliding window."""
    window = min(window, sequence)
    return window * (1 - window / (2 * sequence))


def _project(equation: str, x: jax.Array, weight: Dense[jax.Array], bias: Any, norm: Any, epsilon: float) -> jax.Array:
    """To heads, with Qwen2's bias or Qwen3's norm where the family has one."""
    y = contract(equation, x, weight)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y if norm is None else layers.rms_norm(y, norm, epsilon)


def _block_specs(c: DecoderConfig) -> Block[ParamSpec]:
    E, H, K, D, F = c.embed, c.heads, c.kv_heads, c.head_dim, c.mlp
    into = Normal(0.02)
    back = Normal(0.02 / (2 * c.layers) ** 0.5)  # both branches of all layers add up in the residual stream

    def matrix(shape: tuple[int, ...], axes: str, init: Normal) -> Dense[ParamSpec]:
        return Dense(ParamSpec(shape, axes, init))

    return Block(
        attention_norm=_scale(E, "E"),
        query=matrix((E, H, D), "EHD", into),
        key=matrix((E, K, D), "EKD", into),
        value=matrix((E, K, D), "EKD", into),
        out=matrix((H, D, E), "HDE", back),
        query_bias=_bias((H, D), "HD") if c.qkv_bias else None,
        key_bias=_bias((K, D), "KD") if c.qkv_bias else None,
        value_bias=_bias((K, D), "KD") if c.qkv_bias else None,
        query_norm=_scale(D, "D") if c.qk_norm else None,
        key_norm=_scale(D, "D") if c.qk_norm else None,
        mlp_norm=_scale(E, "E"),
        gate=matrix((E, F), "EF", into),
        up=matrix((E, F), "EF", into),
        down=matrix((F, E), "FE", back),
    )


def _scale(size: int, axes: str) -> ParamSpec:
    return ParamSpec((size,), axes, Fill(1.0), decay=False)


def _bias(shape: tuple[int, ...], axes: str) -> ParamSpec:
    return ParamSpec(shape, axes, Fill(0.0), decay=False)
