"""The decoder: Llama, Qwen2, Qwen3, Mistral, SmolLM, Gemma, Phi, OLMo and free dimensions.

Letters: B batch, S sequence, T new tokens, E embed, F mlp, H heads, K kv heads, D head, V vocab, L layers.

Layers may have different shapes (`LayerShape`). Each shape then has its own stack of parameters and its own cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.models.base import Capabilities, Readout
from forerun.models.decoder_config import ClampedGate, DecoderConfig, ExpertConfig
from forerun.models.decoder_params import Block, Params, decoder_flops, decoder_specs
from forerun.models.keys import Stack
from forerun.models.layer_kinds import LayerKind, LayerShape, Section
from forerun.models.layout import joined, through, unstacked
from forerun.models.recurrent_mixers import NewTokens, PackedRows, Recurrence, filtered, gated_delta, state_specs
from forerun.nn import layers
from forerun.nn.attention import attention, cached_attention
from forerun.nn.compute import Compute, residual
from forerun.nn.context import sequence_split, split_attention
from forerun.nn.kv_cache import Cache, LayerCaches, RecurrentCache
from forerun.nn.rope import Angles, angles, rotate
from forerun.nn.routing import Router, Routing, choose, expert_mlp, together
from forerun.nn.sharding import constrain, with_summed_gradient
from forerun.nn.spec import ParamSpec
from forerun.nn.weights.dense import Dense, as_weight, contract

Numbers = dict[str | None, jax.Array | int]  # for each stack of the cache: the number of its next layer
KeysAndValues = tuple[jax.Array, jax.Array]  # of one layer, [B, S, K, D] or [B, T, K, D]
Kept = dict[str | None, KeysAndValues]  # those of the last layer of each stack, if later layers attend to them
Carry = tuple[jax.Array, Numbers, Kept]  # the residual stream, the numbers, and what is kept
# Parameters of a layer and its input -> [B, S, E], and the keys and values of a layer with attention.
Mix = Callable[[Block[jax.Array], jax.Array], tuple[jax.Array, KeysAndValues | None]]


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
        return Capabilities(
            layers=layers,
            attention_softcap=c.attention_softcap,
            attention_sinks=c.attention_sinks,
            layer_kinds=kinds,
            has_cache=True,
            splits_sequences=c.experts is None and all(kind.mixer == "attention" for kind in kinds),
            has_experts=c.experts is not None,
        )

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
        # With context parallelism, the layers compute on chunks in another order. All else sees the order of the text.
        split = sequence_split(tokens_BS.shape[1]) if self.capabilities.splits_sequences else None
        run_attention: Callable[..., jax.Array] = attention
        if split is not None:
            tokens_BS, segments_BS, positions_BS = (split.spread(x) for x in (tokens_BS, segments_BS, positions_BS))
            run_attention = partial(split_attention, split=split)

        turns = self._angles(positions_BS, segments_BS, compute)

        packed = PackedRows(segments_BS)
        counted_BS = segments_BS > 0 if c.experts else None

        def step(kind: LayerKind, shared: Kept, *, keeps: bool) -> Callable[[Any, Block[jax.Array]], Any]:
            def layer(x_BSE: jax.Array, block: Block[jax.Array]) -> tuple[jax.Array, KeysAndValues | None, Any]:
                block = replace(with_summed_gradient(replace(block, layer_input=None)), layer_input=block.layer_input)

                def attend(q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array) -> jax.Array:
                    q_BSHD, limits = self._tempered(q_BSHD, positions_BS), self._limits(kind, block)
                    return run_attention(q_BSHD, k_BSKD, v_BSKD, segments_BS, kernel=compute.attention, **limits)

                mix: Mix
                if kind.mixer == "attention":
                    earlier = shared.get(kind.stack_name)
                    mix = partial(self.attention, turns=turns.get(kind), attend=attend, shared=earlier)
                else:
                    mix = self._recurrent(kind, packed)
                x_BSE, keys_and_values, routing = self.block(block, x_BSE, mix, counted_BS)
                return x_BSE, keys_and_values if keeps else None, routing

            checkpointed = compute.checkpointed(layer, in_order=c.experts is not None and len(c.layer_kinds) > 1)

            def one(carry: tuple[jax.Array, Kept], block: Block[jax.Array]) -> tuple[tuple[jax.Array, Kept], Any]:
                x_BSE, found, routing = checkpointed(carry[0], block)
                return (x_BSE, carry[1] if found is None else carry[1] | {kind.stack_name: found}), routing

            return one

        x_BSE = self._embed(params, tokens_BS, compute)
        inputs_LBSP = layer_inputs(params, tokens_BS, x_BSE, self._norm)
        kept = self._nothing_kept(x_BSE)
        routings = []
        for section in c.sections:
            shared = kept if section.shares_keys else {}
            # One step per layer kind: windows and RoPE are static, so each kind has its own code in the scan body.
            steps = [step(kind, shared, keeps=kind.stack_name in kept and not shared) for kind in section.kinds]
            blocks = with_layer_inputs(getattr(params, section.name), section, inputs_LBSP)
            carry = (x_BSE, {} if shared else kept)
            names, scanned = section.stack_names, section.scanned
            (x_BSE, after), routing = through(steps, carry, blocks, names, scanned=scanned, unroll=compute.unroll)
            kept = kept if shared else after
            routings.append(routing)
        x_BSE = x_BSE if split is None else split.in_text_order(x_BSE)
        return replace(self._readout(params, x_BSE, compute), routing=together(routings))

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

        shapes = {kind.stack_name: kind.shape for kind in c.all_kinds if not kind.shares_keys}
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
        turns = self._angles(positions_BT, jnp.ones_like(positions_BT), compute, cache.slots)

        def layer(kind: LayerKind, carry: Carry, block: Block[jax.Array]) -> tuple[Carry, Any]:
            x_BTE, numbers, kept = carry
            name = kind.stack_name
            part = cache if isinstance(cache, Cache) else cache.parts[str(name)]
            if isinstance(part, RecurrentCache):
                tokens = NewTokens(part.layer(numbers[name]), positions_BT)
                x_BTE, _, _ = self.block(block, x_BTE, self._recurrent(kind, tokens))
                return (x_BTE, numbers | {name: numbers[name] + 1}, kept), tokens.new
            shared = kept.get(name) if kind.shares_keys else None
            number = numbers[name] - 1 if kind.shares_keys else numbers[name]  # shared: the last layer with own keys

            def attend(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array) -> jax.Array:
                old = part.layer(number)
                q_BTHD = self._tempered(q_BTHD, positions_BT)
                return cached_attention(q_BTHD, k_BTKD, v_BTKD, old, positions_BT, **self._limits(kind, block))

            mix = partial(self.attention, turns=turns.get(kind), attend=attend, shared=shared)
            x_BTE, new, _ = self.block(block, x_BTE, mix)
            if kind.shares_keys:
                return (x_BTE, numbers, kept), None
            kept = kept | {name: new} if new is not None and name in kept else kept
            return (x_BTE, numbers | {name: number + 1}, kept), new

        x_BTE = self._embed(params, tokens_BT, compute)
        inputs_LBTP = layer_inputs(params, tokens_BT, x_BTE, self._norm)
        carry: Carry = (x_BTE, dict.fromkeys({k.stack_name for k in c.all_kinds}, 0), self._nothing_kept(x_BTE))
        outputs: dict[str | None, list[Any]] = {name: [] for name in carry[1]}
        for section in c.sections:
            blocks = with_layer_inputs(getattr(params, section.name), section, inputs_LBTP)
            steps = [partial(layer, kind) for kind in section.kinds]
            carry, made = through(steps, carry, blocks, section.stack_names, scanned=section.scanned)
            for name in () if section.shares_keys else section.shapes:
                outputs[name].append(made if name is None else made[name])
        x_BTE, new = carry[0], {name: joined(each) for name, each in outputs.items()}
        after: Cache[jax.Array] | LayerCaches[jax.Array]
        if isinstance(cache, Cache):
            after = cache.with_tokens(positions_BT, *new[None], after_BTE=x_BTE)
        else:
            after = cache.with_tokens(positions_BT, {str(name): one for name, one in new.items()}, after_BTE=x_BTE)
        return self._readout(params, x_BTE, compute), after

    def block(
        self, block: Block[jax.Array], x_BSE: jax.Array, mix: Mix, counted_BS: jax.Array | None = None
    ) -> tuple[jax.Array, KeysAndValues | None, Routing[jax.Array] | None]:
        """Return the output of one layer, [B, S, E], its keys and values, and the sums of its router if it has experts.

        Args:
            block: Parameters of the layer, without a layer dimension.
            x_BSE: The residual stream.
            mix: The function that mixes positions, such as `attention`. Its input has the norm before it applied.
            counted_BS: The tokens that the router's sums count, or None for no sums.
        """
        # Names of `residual` are those that the job's remat policy can keep. `layer_in` has the layout of the residual
        # stream (split along S by tp), so a kept input takes 1 / tp of the memory.
        x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")

        # ---- Attention, or another mixer ----
        y_BSE, keys_and_values = mix(block, self._norm(x_BSE, block.attention_norm))
        x_BSE = x_BSE + self._scaled(self._norm(y_BSE, block.attention_post_norm))

        # ---- MLP, or experts ----
        y_BSE, routing = layer_mlp(self.config, block, x_BSE, self._norm, counted_BS)
        x_BSE = x_BSE + self._scaled(self._norm(y_BSE, block.mlp_post_norm))
        if block.layer_gate is not None:
            x_BSE = plus_layer_input(x_BSE, block, ACTIVATIONS[self.config.activation], self._norm)
        if block.scalar is not None:
            x_BSE = x_BSE * jax.lax.stop_gradient(block.scalar.astype(x_BSE.dtype))
        return x_BSE, keys_and_values, routing

    def attention(
        self,
        block: Block[jax.Array],
        y_BSE: jax.Array,
        *,
        turns: Angles | None,
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
        shared: KeysAndValues | None = None,
    ) -> tuple[jax.Array, KeysAndValues]:
        """Return the output of the attention of one layer, [B, S, E], and the keys and values that it attended to.

        Args:
            block: Parameters of the layer, without a layer dimension.
            y_BSE: The input of the attention.
            turns: The RoPE angles, or None for a layer without positions.
            attend: A function of queries, keys and values that returns the attention output.
            shared: Keys and values of an earlier layer, for a layer without own ones.
        """
        assert block.query is not None
        assert block.out is not None
        gate_BSHD = None
        if self.config.attention_gate:
            both_BSHJD = plus(contract("BSE,EHJD->BSHJD", y_BSE, block.query), block.query_bias)
            q_BSHD, gate_BSHD = both_BSHJD[..., 0, :], both_BSHJD[..., 1, :]
        else:
            q_BSHD = plus(contract("BSE,EHD->BSHD", y_BSE, block.query), block.query_bias)
        q_BSHD = self._norm(q_BSHD, block.query_norm)
        if shared is None:
            k_BSKD, v_BSKD = self._keys_and_values(block, y_BSE)
            if turns is not None:
                q_BSHD, k_BSKD = rotate(q_BSHD, turns), rotate(k_BSKD, turns)
            q_BSHD, k_BSKD = residual(q_BSHD, "query"), residual(k_BSKD, "key")
            v_BSKD = residual(v_BSKD, "value")
        else:
            k_BSKD, v_BSKD = shared
            q_BSHD = residual(q_BSHD if turns is None else rotate(q_BSHD, turns), "query")
        y_BSHD = attend(q_BSHD, k_BSKD, v_BSKD)
        if gate_BSHD is not None:
            y_BSHD = y_BSHD * jax.nn.sigmoid(gate_BSHD)
        y_BSE = plus(contract("BSHD,HDE->BSE", constrain(y_BSHD, "BSHD"), block.out), block.out_bias)
        return y_BSE, (k_BSKD, v_BSKD)

    def _recurrent(self, kind: LayerKind, recurrence: Recurrence) -> Mix:
        """Return the mixer of a layer that has states instead of keys and values."""
        if kind.mixer == "delta":
            return lambda block, y_BSE: (gated_delta(self.config, block, y_BSE, recurrence), None)
        return lambda block, y_BSE: (filtered(block, y_BSE, recurrence), None)

    def flops_per_token(self, sequence: int) -> float:
        return decoder_flops(self.config, sequence)

    def _angles(
        self, positions_BS: jax.Array, segments_BS: jax.Array, compute: Compute, longest: int | None = None
    ) -> dict[LayerKind, Angles]:
        """Return the RoPE angles of each layer kind, which its layers share. Kinds without positions are absent."""
        kinds = (*self.config.layer_kinds, *self.config.last_kinds)
        turn = partial(angles, by_product=compute.rope_by_product, longest=longest)
        return {kind: turn(kind.rope, positions_BS, segments_BS) for kind in kinds if kind.rope}

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

    def _limits(self, kind: LayerKind, block: Block[jax.Array]) -> dict[str, Any]:
        """Return the settings of the attention of a layer. A family without sinks has no key for them."""
        c = self.config
        sinks = {} if block.sinks is None else {"sinks_H": block.sinks}
        return {"window": kind.window, "scale": c.query_scale, "softcap": c.attention_softcap, **sinks}

    def _norm(self, x: jax.Array, scale: jax.Array | None) -> jax.Array:
        c = self.config
        return x if scale is None else layers.rms_norm(x, scale, c.norm_eps, around_one=c.norm_around_one)

    def _keys_and_values(self, block: Block[jax.Array], y_BSE: jax.Array) -> KeysAndValues:
        """Return keys and values of a layer, with their biases (Qwen2) or norms (Qwen3), before RoPE."""
        assert block.key is not None
        plain_BSKD = plus(contract("BSE,EKD->BSKD", y_BSE, block.key), block.key_bias)
        k_BSKD = self._norm(plain_BSKD, block.key_norm)
        if block.value is None:
            v_BSKD = plain_BSKD
        else:
            v_BSKD = plus(contract("BSE,EKD->BSKD", y_BSE, block.value), block.value_bias)
        if self.config.value_norm:
            v_BSKD = layers.unscaled_rms_norm(v_BSKD, self.config.norm_eps)
        return k_BSKD, v_BSKD

    def _nothing_kept(self, x_BSE: jax.Array) -> Kept:
        """Return zeros for the keys and values that later layers will share, or an empty mapping if none do."""
        c = self.config

        def zeros(kind: LayerKind) -> jax.Array:
            return jnp.zeros((*x_BSE.shape[:2], c.size("K", kind.shape), c.size("D", kind.shape)), x_BSE.dtype)

        return {kind.stack_name: (zeros(kind), zeros(kind)) for kind in c.last_kinds if kind.shares_keys}


# ---- Per-layer embeddings (Gemma 4 E2B and E4B): every layer gets an own small embedding of each token ----
# Letters: L layers, B batch, S sequence, E embed, V vocab, P width of a layer's embedding, Y = L x P.


def layer_inputs(
    params: Any, tokens_BS: jax.Array, x_BSE: jax.Array, norm: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array | None:
    """Return the embedding of each token in each layer, [L, B, S, P], or None if the family has none.

    It is the mean of a row of a table and a projection of the token's normal embedding, times sqrt(2).

    Args:
        params: The model's parameters.
        tokens_BS: The tokens.
        x_BSE: Their scaled embeddings, the input of the first layer.
        norm: The norm function of the model.
    """
    if params.layer_embed is None:
        return None
    P = params.layer_projection_norm.shape[0]
    dtype = x_BSE.dtype

    def by_layer(y_BSY: jax.Array) -> jax.Array:
        return y_BSY.reshape(*tokens_BS.shape, -1, P)

    found_BSLP = by_layer(layers.embed(params.layer_embed, tokens_BS, dtype)) * jnp.asarray(P**0.5, dtype)
    projected_BSY = contract("BSE,EY->BSY", x_BSE, Dense(params.layer_projection))
    projected_BSY = projected_BSY * jnp.asarray(x_BSE.shape[-1] ** -0.5, dtype)
    mixed_BSLP = norm(by_layer(projected_BSY), params.layer_projection_norm) + found_BSLP
    return constrain(jnp.moveaxis(mixed_BSLP * jnp.asarray(0.5**0.5, dtype), 2, 0), "LBSP")


def plus_layer_input(
    x_BSE: jax.Array,
    block: Any,
    activation: Callable[[jax.Array], jax.Array],
    norm: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Return the residual stream of a layer after its own embedding is added, gated by the stream itself."""
    gate_BSP = activation(contract("BSE,EP->BSP", x_BSE, block.layer_gate))
    y_BSE = contract("BSP,PE->BSE", gate_BSP * block.layer_input, block.layer_out)
    return x_BSE + norm(y_BSE, block.layer_post_norm)


def with_layer_inputs(part: Any, section: Section, inputs_LBSP: jax.Array | None) -> Any:
    """Return the blocks of a section, each with the input of its layer, or unchanged if there are no inputs.

    Args:
        part: One stack, a tuple of layers, or a mapping from names to stacks or tuples.
        section: The section.
        inputs_LBSP: The inputs of all layers of the model, or None.
    """
    if inputs_LBSP is None:
        return part

    def fed(blocks: Any, name: str | None) -> Any:
        numbers = section.numbers(name)
        if isinstance(blocks, tuple):
            return tuple(replace(block, layer_input=inputs_LBSP[n]) for block, n in zip(blocks, numbers, strict=True))
        return replace(blocks, layer_input=inputs_LBSP[np.array(numbers)])

    if section.stack_names is None:
        return fed(part, None)
    return {name: fed(blocks, name) for name, blocks in part.items()}


# ---- The MLP of a layer: one gated MLP, a mixture of experts, or both ----
# `forerun.models.decoder` explains the letters.


Norm = Callable[[jax.Array, jax.Array | None], jax.Array]  # values and the scale of a norm -> normed values
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}


def layer_mlp(
    c: DecoderConfig, block: Block[jax.Array], x_BSE: jax.Array, norm: Norm, counted_BS: jax.Array | None
) -> tuple[jax.Array, Routing[jax.Array] | None]:
    """Return the output of the MLP of one layer, [B, S, E], and the sums of its router.

    Args:
        c: The dimensions.
        block: Parameters of the layer, without a layer dimension.
        x_BSE: The residual stream.
        norm: The function that applies a norm of the layer, or returns its input if the layer does not have the norm.
        counted_BS: The tokens that the router's sums count, or None for no sums.
    """
    y_BSE = norm(x_BSE, block.mlp_norm)
    if c.experts is None:
        return _gated(c, block, y_BSE), None
    if c.experts.beside:
        dense_BSE = norm(_gated(c, block, y_BSE), block.dense_post_norm)
        routed_BSE = norm(x_BSE, block.router_norm) * c.embed**-0.5
        experts_BSE, sums = _mixture(c, c.experts, block, norm(x_BSE, block.expert_norm), routed_BSE, counted_BS)
        return dense_BSE + norm(experts_BSE, block.expert_post_norm), sums
    experts_BSE, sums = _mixture(c, c.experts, block, y_BSE, y_BSE, counted_BS)
    if not c.experts.shared:
        return experts_BSE, sums
    assert block.shared_gate is not None
    gate_BSA = jax.nn.sigmoid(contract("BSE,EA->BSA", y_BSE, block.shared_gate))
    return experts_BSE + gate_BSA * _gated(c, block, y_BSE), sums


def _gated(c: DecoderConfig, block: Block[jax.Array], y_BSE: jax.Array) -> jax.Array:
    assert block.gate is not None
    assert block.up is not None
    assert block.down is not None
    gate_BSF = residual(plus(contract("BSE,EF->BSF", y_BSE, block.gate), block.gate_bias), "mlp_gate")
    up_BSF = residual(plus(contract("BSE,EF->BSF", y_BSE, block.up), block.up_bias), "mlp_up")
    y_BSE = contract("BSF,FE->BSE", ACTIVATIONS[c.activation](gate_BSF) * up_BSF, block.down)
    return plus(y_BSE, block.down_bias)


def _mixture(
    c: DecoderConfig,
    e: ExpertConfig,
    block: Block[jax.Array],
    y_BSE: jax.Array,
    routed_BSE: jax.Array,
    counted_BS: jax.Array | None,
) -> tuple[jax.Array, Routing[jax.Array] | None]:
    """Return the output of the experts for the inputs `y_BSE`. The router reads `routed_BSE`."""
    assert block.router is not None
    logits_BSX = plus(contract("BSE,EX->BSX", routed_BSE, block.router), block.router_bias).astype(jnp.float32)
    router = Router(e.top, e.normalised, e.sigmoid, block.router_correction, block.expert_scale)
    choice = choose(logits_BSX, router, counted_BS)
    weights = (block.expert_gate, block.expert_up, block.expert_down)
    biases = (block.expert_gate_bias, block.expert_up_bias, block.expert_down_bias) if e.bias else None

    def between(gate: jax.Array, up: jax.Array) -> jax.Array:
        return ACTIVATIONS[c.activation](gate) * up if e.clamped is None else clamped(e.clamped, gate, up)

    return expert_mlp(y_BSE, choice, weights, e.count, between, biases), choice.sums


def clamped(settings: ClampedGate, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the clamped SwiGLU of gpt-oss. The gate has no lower limit."""
    gate = jnp.minimum(gate, settings.limit)
    up = jnp.clip(up, -settings.limit, settings.limit)
    return gate * jax.nn.sigmoid(gate * settings.alpha) * (up + 1)


def plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return `y` with a bias, if the layer has one."""
    return y if bias is None else y + bias.astype(y.dtype)
