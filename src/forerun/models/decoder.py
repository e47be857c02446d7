"""The decoder: Llama, Qwen2, Qwen3, Mistral, SmolLM, Gemma, Phi, OLMo and free dimensions.

Letters: B batch, S sequence, T new tokens, E embed, F mlp, H heads, K kv heads, D head, V vocab, L layers.

Layers may have different shapes (`LayerShape`). Each shape then has its own stack of parameters and its own cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from forerun.models.base import Capabilities, Readout
from forerun.models.decoder_params import Block, Params, decoder_specs
from forerun.models.keys import Stack
from forerun.models.layer_kinds import LayerKind, LayerShape, Section
from forerun.models.layout import StepWithOutput, joined, silent, through, unstacked
from forerun.models.recurrent_mixers import NewTokens, PackedRows, Recurrence, filtered, gated_delta, state_specs
from forerun.models.sizes import DecoderConfig
from forerun.nn import layers
from forerun.nn.attention import attention, cached_attention
from forerun.nn.compute import Compute, residual
from forerun.nn.kv_cache import Cache
from forerun.nn.layer_caches import LayerCaches, RecurrentCache
from forerun.nn.rope import Angles, angles, rotate
from forerun.nn.sharding import constrain
from forerun.nn.spec import ParamSpec, count
from forerun.nn.weights.dense import Dense, as_weight, contract

Numbers = dict[str | None, jax.Array | int]  # for each stack of the cache: the number of its next layer
Carry = tuple[jax.Array, Numbers]  # the residual stream and the numbers
KeysAndValues = tuple[jax.Array, jax.Array]  # keys and values of one layer, [B, T, K, D]
Mix = Callable[[Block[jax.Array], jax.Array], jax.Array]  # parameters of a layer and its input -> [B, S, E]


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
        kinds = (*c.layer_kinds, *c.last_kinds)
        # Of layers with different shapes, no stack has all layers. Values that a scan saves have one entry per period.
        layers = c.layers if c.sections[0].stack_names is None else c.sections[0].layers // len(c.layer_kinds)
        return Capabilities(layers=layers, attention_softcap=c.attention_softcap, layer_kinds=kinds, has_cache=True)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The parts of the parameters that contain layers, in order."""
        return tuple(
            Stack(section.name if name is None else f"{section.name}.{name}", section.numbers(name))
            for section in self.config.sections
            for name in section.shapes
        )

    def specs(self) -> Params[ParamSpec]:
        return decoder_specs(self.config)

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
                self._tempered(q_BSHD, positions_BS),
                k_BSKD,
                v_BSKD,
                segments_BS,
                window=kind.window,
                kernel=compute.attention,
                scale=c.query_scale,
                softcap=c.attention_softcap,
            )

        turns = self._angles(positions_BS, segments_BS)

        packed = PackedRows(segments_BS)

        def layer(kind: LayerKind, x_BSE: jax.Array, block: Block[jax.Array]) -> jax.Array:
            if kind.mixer != "attention":
                return self.block(block, x_BSE, self._recurrent(kind, packed))
            return self.block(
                block, x_BSE, partial(self.attention, turns=turns.get(kind), attend=partial(attend, kind=kind))
            )

        x_BSE = self._embed(params, tokens_BS, compute)
        for section in c.sections:
            # One step per layer kind: windows and RoPE are static, so each kind has its own code in the scan body.
            steps = [silent(compute.checkpointed(partial(layer, kind))) for kind in section.kinds]
            x_BSE, _ = _through_section(section, steps, x_BSE, params)
        return self._readout(params, x_BSE, compute)

    def unstacked(self, params: Params[jax.Array]) -> Params[jax.Array]:
        """Return `params` with separate layers, for `extend` on a CPU. The arrays of `params` are deleted."""
        unstacked_params: Params[jax.Array] = unstacked(params, self.stacks)
        return unstacked_params

    def cache(self, rows: int, length: int, dtype: Any) -> Cache[ParamSpec] | LayerCaches[ParamSpec]:
        """Return the specs of a cache for `rows` texts of up to `length` tokens."""
        c = self.config

        def part(shape: LayerShape | None) -> Cache[ParamSpec] | RecurrentCache[ParamSpec]:
            layers = sum(kind.shape == shape for kind in c.all_kinds)
            if shape is not None and shape.mixer != "attention":
                return state_specs(c, shape, layers, rows, dtype)
            return Cache.specs(layers, rows, length, c.size("K", shape), c.size("D", shape), dtype)

        shapes = {kind.stack_name: kind.shape for kind in c.all_kinds if not (kind.shape and kind.shape.shares_keys)}
        if None in shapes:
            return Cache.specs(c.layers, rows, length, c.kv_heads, c.head_dim, dtype)
        return LayerCaches({str(name): part(shape) for name, shape in shapes.items()})

    def extend(
        self,
        params: Params[jax.Array],
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Cache[jax.Array] | LayerCaches[jax.Array],
        compute: Compute,
    ) -> tuple[Readout, Cache[jax.Array] | LayerCaches[jax.Array]]:
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

        def layer(kind: LayerKind, carry: Carry, block: Block[jax.Array]) -> tuple[Carry, Any]:
            x_BTE, numbers = carry
            number, part = numbers[kind.stack_name], _part(cache, kind)
            after = numbers | {kind.stack_name: number + 1}
            if isinstance(part, RecurrentCache):
                tokens = NewTokens(part.layer(number), positions_BT)
                return (self.block(block, x_BTE, self._recurrent(kind, tokens)), after), tokens.new
            new: list[KeysAndValues] = []

            def attend(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array) -> jax.Array:
                new.append((k_BTKD, v_BTKD))
                limits: dict[str, Any] = {"scale": c.query_scale, "softcap": c.attention_softcap}
                old = part.layer(number)
                q_BTHD = self._tempered(q_BTHD, positions_BT)
                return cached_attention(q_BTHD, k_BTKD, v_BTKD, old, positions_BT, window=kind.window, **limits)

            x_BTE = self.block(block, x_BTE, partial(self.attention, turns=turns.get(kind), attend=attend))
            return (x_BTE, after), new[0]

        carry: Carry = (self._embed(params, tokens_BT, compute), dict.fromkeys({k.stack_name for k in c.all_kinds}, 0))
        outputs: dict[str | None, list[Any]] = {name: [] for name in carry[1]}
        for section in c.sections:
            carry, found = _through_section(section, [partial(layer, kind) for kind in section.kinds], carry, params)
            for name in section.shapes:
                outputs[name].append(found if name is None else found[name])
        x_BTE, new = carry[0], {name: joined(each) for name, each in outputs.items()}
        after: Cache[jax.Array] | LayerCaches[jax.Array]
        if isinstance(cache, Cache):
            after = cache.with_tokens(positions_BT, *new[None], after_BTE=x_BTE)
        else:
            after = cache.with_tokens(positions_BT, {str(name): one for name, one in new.items()}, after_BTE=x_BTE)
        return self._readout(params, x_BTE, compute), after

    def block(self, block: Block[jax.Array], x_BSE: jax.Array, mix: Mix) -> jax.Array:
        """Return the output of one layer, [B, S, E].

        Args:
            block: Parameters of the layer, without a layer dimension.
            x_BSE: The residual stream.
            mix: The function that mixes positions, such as `attention`. Its input has the norm before it applied.
        """
        # Names of `residual` are those that the job's remat policy can keep. `layer_in` has the layout of the residual
        # stream (split along S by tp), so a kept input takes 1 / tp of the memory.
        x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")

        # ---- Attention, or another mixer ----
        y_BSE = mix(block, self._norm(x_BSE, block.attention_norm))
        x_BSE = x_BSE + self._scaled(self._norm(y_BSE, block.attention_post_norm))

        # ---- Gated MLP ----
        y_BSE = self._norm(x_BSE, block.mlp_norm)
        gate_BSF = residual(_plus(contract("BSE,EF->BSF", y_BSE, block.gate), block.gate_bias), "mlp_gate")
        up_BSF = residual(_plus(contract("BSE,EF->BSF", y_BSE, block.up), block.up_bias), "mlp_up")
        y_BSE = contract("BSF,FE->BSE", _ACTIVATIONS[self.config.activation](gate_BSF) * up_BSF, block.down)
        return x_BSE + self._scaled(self._norm(_plus(y_BSE, block.down_bias), block.mlp_post_norm))

    def attention(
        self,
        block: Block[jax.Array],
        y_BSE: jax.Array,
        *,
        turns: Angles | None,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """Return the output of the attention of one layer, [B, S, E].

        Args:
            block: Parameters of the layer, without a layer dimension.
            y_BSE: The input of the attention.
            turns: The RoPE angles, or None for a layer without positions.
            attend: A function of queries, keys and values that returns the attention output.
        """
        assert block.query is not None
        assert block.key is not None
        assert block.value is not None
        assert block.out is not None
        gate_BSHD = None
        if self.config.attention_gate:
            both_BSHJD = _plus(contract("BSE,EHJD->BSHJD", y_BSE, block.query), block.query_bias)
            q_BSHD, gate_BSHD = self._norm(both_BSHJD[..., 0, :], block.query_norm), both_BSHJD[..., 1, :]
        else:
            q_BSHD = self._heads("BSE,EHD->BSHD", y_BSE, block.query, block.query_bias, block.query_norm)
        k_BSKD = self._heads("BSE,EKD->BSKD", y_BSE, block.key, block.key_bias, block.key_norm)
        v_BSKD = self._heads("BSE,EKD->BSKD", y_BSE, block.value, block.value_bias, None)
        if turns is not None:
            q_BSHD, k_BSKD = rotate(q_BSHD, turns), rotate(k_BSKD, turns)
        q_BSHD, k_BSKD = residual(q_BSHD, "query"), residual(k_BSKD, "key")
        y_BSHD = attend(q_BSHD, k_BSKD, residual(v_BSKD, "value"))
        if gate_BSHD is not None:
            y_BSHD = y_BSHD * jax.nn.sigmoid(gate_BSHD)
        return _plus(contract("BSHD,HDE->BSE", constrain(y_BSHD, "BSHD"), block.out), block.out_bias)

    def _recurrent(self, kind: LayerKind, recurrence: Recurrence) -> Mix:
        """Return the mixer of a layer that has states instead of keys and values."""
        if kind.mixer == "delta":
            return lambda block, y_BSE: gated_delta(self.config, block, y_BSE, recurrence)
        return lambda block, y_BSE: filtered(block, y_BSE, recurrence)

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs per token of a forward and backward pass.

        Counts 6 per matrix element (2 forward, 4 backward). Causal attention adds 12 x heads x head_dim x S/2 per
        layer, or less with a window. The gated delta rule adds 18 per element of its state: it reads the state twice
        and writes it once. The embedding counts only if it is also the output matrix.
        """
        c = self.config
        matrices = count([leaf for leaf in jax.tree.leaves(self.specs()) if leaf.decay]) - c.vocab * c.embed
        if c.tied:
            matrices += c.vocab * c.embed
        scores = sum(
            c.size("H", kind.shape)
            * c.size("D", kind.shape)
            * (sequence / 2 if kind.window is None else _mean_window(sequence, kind.window))
            for kind in c.all_kinds
            if kind.mixer == "attention"
        )
        shapes = [kind.shape for kind in c.all_kinds if kind.mixer == "delta"]
        states = sum(c.size("H", shape) * c.size("D", shape) * c.size("W", shape) for shape in shapes)
        return 6.0 * matrices + 12.0 * scores + 18.0 * states

    def _angles(self, positions_BS: jax.Array, segments_BS: jax.Array) -> dict[LayerKind, Angles]:
        """Return the RoPE angles of each layer kind, which its layers share. Kinds without positions are absent."""
        kinds = (*self.config.layer_kinds, *self.config.last_kinds)
        return {kind: angles(kind.rope, positions_BS, segments_BS) for kind in kinds if kind.rope}

    def _embed(self, params: Params[jax.Array], tokens_BS: jax.Array, compute: Compute) -> jax.Array:
        x_BSE = layers.embed(params.embed, tokens_BS, compute.dtype)
        scale = self.config.embed_scale
        return x_BSE if scale == 1.0 else x_BSE * jnp.asarray(scale, compute.dtype)

    def _readout(self, params: Params[jax.Array], x_BSE: jax.Array, compute: Compute) -> Readout:
        matrix = (params.head or as_weight(params.embed)).matrix("VE", compute.dtype)
        norm, divisor = params.norm, self.config.logit_divisor
        if divisor != 1.0:  # the norm's E weights are divided instead of the V logits of each token
            norm = norm.astype(jnp.float32) / divisor
        return Readout(self._norm(x_BSE, norm), matrix, self.config.logit_softcap)

    def _scaled(self, y_BSE: jax.Array) -> jax.Array:
        """Return the output of attention or MLP as it is added to the residual stream."""
        scale = self.config.residual_scale
        return y_BSE if scale == 1.0 else (y_BSE.astype(jnp.float32) * scale).astype(y_BSE.dtype)

    def _tempered(self, q_BSHD: jax.Array, positions_BS: jax.Array) -> jax.Array:
        """Return the queries, multiplied by the temperature of their positions if the family has one."""
        temperature = self.config.query_temperature
        if temperature is None:
            return q_BSHD
        spans_BS = (positions_BS // temperature.original).astype(jnp.float32)
        factors_BS = 1.0 + temperature.beta * jnp.log1p(spans_BS)
        return q_BSHD * factors_BS[:, :, None, None].astype(q_BSHD.dtype)

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


def _through_section(
    section: Section, steps: list[StepWithOutput], carry: Any, params: Params[jax.Array]
) -> tuple[Any, Any]:
    """Return the carry after the layers of a section, and their outputs as `through` returns them."""
    return through(steps, carry, getattr(params, section.name), section.stack_names, scanned=section.scanned)


def _part(
    cache: Cache[jax.Array] | LayerCaches[jax.Array], kind: LayerKind
) -> Cache[jax.Array] | RecurrentCache[jax.Array]:
    """Return the cache of the layers that have the shape of this kind."""
    return cache if isinstance(cache, Cache) else cache.parts[str(kind.stack_name)]
