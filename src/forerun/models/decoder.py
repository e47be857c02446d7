"""The decoder: Llama, Qwen2, Qwen3, Mistral, SmolLM, Gemma, Phi, OLMo and free dimensions.

Letters: B batch, S sequence, T new tokens, E embed, F mlp, H heads, K kv heads, D head, V vocab, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.models.base import Capabilities, Readout
from forerun.models.keys import Stack
from forerun.models.layout import per_layer, per_layer_with_outputs, unstacked
from forerun.models.parameter_axes import bias_axes, matrix_axes, norm_axes, outer_axes, shape_of
from forerun.models.sizes import DecoderConfig, LayerKind
from forerun.nn import layers
from forerun.nn.attention import attention, cached_attention
from forerun.nn.compute import Compute, residual
from forerun.nn.kv_cache import Cache
from forerun.nn.rope import Angles, angles, rotate
from forerun.nn.sharding import constrain
from forerun.nn.spec import Fill, Normal, ParamSpec, count, stack
from forerun.nn.weights.dense import Dense, as_weight, contract

T = TypeVar("T")
Carry = tuple[jax.Array, jax.Array | int]  # the residual stream and the number of the layer
NewTokens = tuple[jax.Array, jax.Array]  # keys and values of one layer, [B, T, K, D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Block(Generic[T]):
    """Parameters of one layer. A parameter that the family does not have is None."""

    attention_norm: T | None = None
    query: Dense[T]
    key: Dense[T]
    value: Dense[T]
    out: Dense[T]
    query_bias: T | None = None
    key_bias: T | None = None
    value_bias: T | None = None
    out_bias: T | None = None
    query_norm: T | None = None
    key_norm: T | None = None
    attention_post_norm: T | None = None
    mlp_norm: T | None = None
    gate: Dense[T]
    up: Dense[T]
    down: Dense[T]
    gate_bias: T | None = None
    up_bias: T | None = None
    down_bias: T | None = None
    mlp_post_norm: T | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params(Generic[T]):
    """Parameters of a decoder."""

    embed: T
    blocks: Block[T]  # stacked layers: every leaf has a leading L
    norm: T
    head: Dense[T] | None  # None: the embedding is the output matrix
    tail: Block[T] | None = None  # stacked layers at the end that do not fill a period of layer kinds


@dataclass(frozen=True)
class Decoder:
    """A decoder model."""

    config: DecoderConfig

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def heads(self) -> int:
        return self.config.heads

    @property
    def capabilities(self) -> Capabilities:
        c = self.config
        return Capabilities(
            layers=c.layers, attention_softcap=c.attention_softcap, layer_kinds=c.layer_kinds, has_cache=True
        )

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The parts of the parameters that contain layers, in order."""
        c = self.config
        whole = Stack("blocks", 0, c.layers - c.tail_layers)
        return (whole, Stack("tail", whole.layers, c.tail_layers)) if c.tail_layers else (whole,)

    def specs(self) -> Params[ParamSpec]:
        c, axes = self.config, outer_axes(self.config)
        embed, head = axes["embed"], axes.get("head")
        return Params(
            embed=ParamSpec(shape_of(c, embed), embed, Normal(0.02)),
            blocks=stack(_block_specs(c), c.layers - c.tail_layers),
            norm=_scale(c, axes["norm"]),
            head=Dense(ParamSpec(shape_of(c, head), head, Normal(0.02), inputs=0)) if head else None,
            tail=stack(_block_specs(c), c.tail_layers) if c.tail_layers else None,
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

        def attend(q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, kind: LayerKind) -> jax.Array:
            return attention(
                q_BSHD,
                k_BSKD,
                v_BSKD,
                segments_BS,
                window=kind.window,
                kernel=compute.attention,
                scale=c.query_scale,
                softcap=c.attention_softcap,
            )

        turns = self._angles(positions_BS, segments_BS)

        def layer(kind: LayerKind, x_BSE: jax.Array, block: Block[jax.Array]) -> jax.Array:
            return self.block(block, x_BSE, turns.get(kind), partial(attend, kind=kind))

        # One step per layer kind: windows and RoPE are static, so each kind has its own code in the scan body.
        steps = [compute.checkpointed(partial(layer, kind)) for kind in c.layer_kinds]
        x_BSE = self._embed(params, tokens_BS, compute)
        x_BSE = per_layer(steps, x_BSE, params.blocks, params.tail)
        return self._readout(params, x_BSE, compute)

    def unstacked(self, params: Params[jax.Array]) -> Params[jax.Array]:
        """Return `params` with separate layers, for `extend` on a CPU. The arrays of `params` are deleted."""
        unstacked_params: Params[jax.Array] = unstacked(params, self.stacks)
        return unstacked_params

    def cache(self, rows: int, length: int, dtype: Any) -> Cache[ParamSpec]:
        """Return the specs of a key/value cache for `rows` texts of up to `length` tokens."""
        c = self.config
        return Cache.specs(c.layers, rows, length, c.kv_heads, c.head_dim, dtype)

    def extend(
        self,
        params: Params[jax.Array],
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Cache[jax.Array],
        compute: Compute,
    ) -> tuple[Readout, Cache[jax.Array]]:
        """Compute new tokens of each row, and return their read-out and the cache with their keys and values.

        A caller must read a row again from its start when it grows beyond LongRope's original context, because all of
        its keys change.

        Args:
            params: Parameters, stacked or from `unstacked`.
            tokens_BT: New tokens. A shorter row is padded at its end.
            positions_BT: Consecutive positions in each row. Padding repeats the last position of its row.
            cache: Keys and values of the earlier tokens.
            compute: The compute dtype. Its attention kernel and remat policy are not used.
        """
        c = self.config
        turns = self._angles(positions_BT, jnp.ones_like(positions_BT))

        def layer(kind: LayerKind, carry: Carry, block: Block[jax.Array]) -> tuple[Carry, NewTokens]:
            x_BTE, number = carry
            new: list[NewTokens] = []

            def attend(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array) -> jax.Array:
                new.append((k_BTKD, v_BTKD))
                limits: dict[str, Any] = {"scale": c.query_scale, "softcap": c.attention_softcap}
                old = cache.layer(number)
                return cached_attention(q_BTHD, k_BTKD, v_BTKD, old, positions_BT, window=kind.window, **limits)

            return (self.block(block, x_BTE, turns.get(kind), attend), number + 1), new[0]

        start = (self._embed(params, tokens_BT, compute), 0)
        steps = [partial(layer, kind) for kind in c.layer_kinds]
        (x_BTE, _), new = per_layer_with_outputs(steps, start, params.blocks, params.tail)
        return self._readout(params, x_BTE, compute), cache.with_tokens(positions_BT, *new, after_BTE=x_BTE)

    def block(
        self,
        block: Block[jax.Array],
        x_BSE: jax.Array,
        turns: Angles | None,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """Return the output of one layer, [B, S, E].

        Args:
            block: Parameters of the layer, without a layer dimension.
            x_BSE: The residual stream.
            turns: The RoPE angles, or None for a layer without positions.
            attend: A function of queries, keys and values that returns the attention output.
        """
        # Names of `residual` are those that the job's remat policy can keep. `layer_in` has the layout of the residual
        # stream (split along S by tp), so a kept input takes 1 / tp of the memory.
        x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")

        # ---- Attention ----
        y_BSE = self._norm(x_BSE, block.attention_norm)
        q_BSHD = self._heads("BSE,EHD->BSHD", y_BSE, block.query, block.query_bias, block.query_norm)
        k_BSKD = self._heads("BSE,EKD->BSKD", y_BSE, block.key, block.key_bias, block.key_norm)
        v_BSKD = self._heads("BSE,EKD->BSKD", y_BSE, block.value, block.value_bias, None)
        if turns is not None:
            q_BSHD, k_BSKD = rotate(q_BSHD, turns), rotate(k_BSKD, turns)
        q_BSHD, k_BSKD = residual(q_BSHD, "query"), residual(k_BSKD, "key")
        y_BSHD = attend(q_BSHD, k_BSKD, residual(v_BSKD, "value"))
        y_BSE = _plus(contract("BSHD,HDE->BSE", constrain(y_BSHD, "BSHD"), block.out), block.out_bias)
        x_BSE = x_BSE + self._norm(y_BSE, block.attention_post_norm)

        # ---- Gated MLP ----
        y_BSE = self._norm(x_BSE, block.mlp_norm)
        gate_BSF = residual(_plus(contract("BSE,EF->BSF", y_BSE, block.gate), block.gate_bias), "mlp_gate")
        up_BSF = residual(_plus(contract("BSE,EF->BSF", y_BSE, block.up), block.up_bias), "mlp_up")
        y_BSE = contract("BSF,FE->BSE", _ACTIVATIONS[self.config.activation](gate_BSF) * up_BSF, block.down)
        return x_BSE + self._norm(_plus(y_BSE, block.down_bias), block.mlp_post_norm)

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs per token of a forward and backward pass.

        Counts 6 per matrix element (2 forward, 4 backward). Causal attention adds 12 x heads x head_dim x S/2 per
        layer, or less with a window. The embedding counts only if it is also the output matrix.
        """
        c = self.config
        matrices = count([leaf for leaf in jax.tree.leaves(self.specs()) if leaf.decay]) - c.vocab * c.embed
        if c.tied:
            matrices += c.vocab * c.embed
        windows = [c.layer_kinds[n % len(c.layer_kinds)].window for n in range(c.layers)]
        seen = sum(sequence / 2 if window is None else _mean_window(sequence, window) for window in windows)
        return 6.0 * matrices + 12.0 * c.heads * c.head_dim * seen

    def _angles(self, positions_BS: jax.Array, segments_BS: jax.Array) -> dict[LayerKind, Angles]:
        """Return the RoPE angles of each layer kind, which its layers share. Kinds without positions are absent."""
        return {kind: angles(kind.rope, positions_BS, segments_BS) for kind in self.config.layer_kinds if kind.rope}

    def _embed(self, params: Params[jax.Array], tokens_BS: jax.Array, compute: Compute) -> jax.Array:
        x_BSE = layers.embed(params.embed, tokens_BS, compute.dtype)
        scale = self.config.embed_scale
        return x_BSE if scale == 1.0 else x_BSE * jnp.asarray(scale, compute.dtype)

    def _readout(self, params: Params[jax.Array], x_BSE: jax.Array, compute: Compute) -> Readout:
        matrix = (params.head or as_weight(params.embed)).matrix("VE", compute.dtype)
        return Readout(self._norm(x_BSE, params.norm), matrix, self.config.logit_softcap)

    def _norm(self, x: jax.Array, scale: jax.Array | None) -> jax.Array:
        c = self.config
        return x if scale is None else layers.rms_norm(x, scale, c.norm_eps, around_one=c.norm_around_one)

    def _heads(self, equation: str, x: jax.Array, weight: Dense[jax.Array], bias: Any, norm: Any) -> jax.Array:
        """Return the projection of `x` to heads, with the bias (Qwen2) or norm (Qwen3) if the family has one."""
        return self._norm(_plus(contract(equation, x, weight), bias), norm)


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.astype(y.dtype)


def _mean_window(sequence: int, window: int) -> float:
    """Return the mean number of visible positions under a sliding window."""
    window = min(window, sequence)
    return window * (1 - window / (2 * sequence))


def _block_specs(c: DecoderConfig) -> Block[ParamSpec]:
    into = Normal(0.02)
    back = Normal(0.02 / (2 * c.layers) ** 0.5)  # 2 x layers outputs add up in the residual stream
    start = {"out": back, "down": back}
    inputs = {"out": 2}  # it sums over H and D
    members: dict[str, Any] = {
        name: Dense(ParamSpec(shape_of(c, axes), axes, start.get(name, into), inputs=inputs.get(name, 1)))
        for name, axes in matrix_axes().items()
    }
    members |= {name: _scale(c, axes) for name, axes in norm_axes(c).items()}
    members |= {name: ParamSpec(shape_of(c, axes), axes, Fill(0.0), decay=False) for name, axes in bias_axes(c).items()}
    return Block(**members)


def _scale(c: DecoderConfig, axes: str) -> ParamSpec:
    return ParamSpec(shape_of(c, axes), axes, Fill(0.0 if c.norm_around_one else 1.0), decay=False)
