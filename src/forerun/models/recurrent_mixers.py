"""Mixers with a state instead of keys and values: the gated delta rule (Qwen3.5) and short convolutions (LFM2).

A mixer computes its projections here. How positions are connected depends on the use: `PackedRows` for training, and
`NewTokens` for generation. `forerun.models.decoder` explains the letters, and W is a head of values, I the width of a
convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from forerun.models.decoder_config import DecoderConfig
from forerun.models.decoder_params import Block
from forerun.models.layer_kinds import LayerShape
from forerun.nn import layers
from forerun.nn.compute import residual
from forerun.nn.gated_delta import DeltaInputs, extended_delta_rule, gated_delta_rule
from forerun.nn.kv_cache import RecurrentCache
from forerun.nn.sharding import constrain
from forerun.nn.short_convolution import extended_convolution, real_tokens, short_convolution
from forerun.nn.spec import Fill, ParamSpec
from forerun.nn.weights.dense import contract

Activation = Callable[[jax.Array], jax.Array]


class Recurrence(Protocol):
    """The connection of positions."""

    def convolve(self, name: str, x: jax.Array, weight: jax.Array, activation: Activation | None = None) -> jax.Array:
        """Return a short convolution of `x`. `name` is the name of its state."""

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        """Return the output of the gated delta rule, [B, S, H, W]."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of complete documents, each with an empty state at its start."""

    segments_BS: jax.Array

    def convolve(self, name: str, x: jax.Array, weight: jax.Array, activation: Activation | None = None) -> jax.Array:
        return short_convolution(x, weight, self.segments_BS, activation=activation)

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        return gated_delta_rule(inputs, self.segments_BS)


@dataclass(frozen=True)
class NewTokens:
    """New tokens of each row, after the tokens that the old states contain. It collects the states after them.

    A row whose first new token is at position 0 is a new text, so its old states count as zero.
    """

    old: dict[str, jax.Array]
    positions_BT: jax.Array
    new: dict[str, jax.Array] = field(default_factory=dict)

    def convolve(self, name: str, x: jax.Array, weight: jax.Array, activation: Activation | None = None) -> jax.Array:
        y, self.new[name] = extended_convolution(x, weight, self._before(name), self._real, activation=activation)
        return y

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        y_BTHW, self.new["state"] = extended_delta_rule(inputs, self._before("state"), self._real)
        return y_BTHW

    @property
    def _real(self) -> jax.Array:
        return real_tokens(self.positions_BT)

    def _before(self, name: str) -> jax.Array:
        old = self.old[name]
        is_new = (self.positions_BT[:, 0] == 0).reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(is_new, jnp.zeros((), old.dtype), old)


def state_specs(c: DecoderConfig, shape: LayerShape, layers: int, rows: int, dtype: Any) -> RecurrentCache[ParamSpec]:
    """Return the specs of the states of all layers of one shape. They do not grow with the text."""
    sizes = {"L": layers, "B": rows, "I": c.size("I", shape) - 1}

    def one(axes: str, dtype: Any) -> ParamSpec:
        return ParamSpec(tuple(sizes.get(axis) or c.size(axis, shape) for axis in axes), axes, Fill(0.0), dtype)

    if shape.mixer == "convolution":
        return RecurrentCache({"filter": one("LBIHD", dtype)})
    inputs = {"query": "LBIKD", "key": "LBIKD", "value": "LBIHW"}
    return RecurrentCache(
        {"state": one("LBHDW", jnp.float32), **{name: one(axes, dtype) for name, axes in inputs.items()}}
    )


def gated_delta(c: DecoderConfig, block: Block[jax.Array], y_BSE: jax.Array, recurrence: Recurrence) -> jax.Array:
    """Return the output of a gated delta layer, [B, S, E], before it is added to the residual stream."""
    b = block
    assert b.delta_query and b.delta_key and b.delta_value and b.delta_gate  # noqa: PT018
    assert b.delta_strength and b.delta_decay and b.delta_out  # noqa: PT018
    assert b.query_filter is not None
    assert b.key_filter is not None
    assert b.value_filter is not None
    assert b.decay_rate is not None
    assert b.decay_bias is not None
    assert b.delta_norm is not None
    silu = jax.nn.silu
    q_BSKD = recurrence.convolve("query", contract("BSE,EKD->BSKD", y_BSE, b.delta_query), b.query_filter, silu)
    k_BSKD = recurrence.convolve("key", contract("BSE,EKD->BSKD", y_BSE, b.delta_key), b.key_filter, silu)
    v_BSHW = recurrence.convolve("value", contract("BSE,EHW->BSHW", y_BSE, b.delta_value), b.value_filter, silu)
    # Strengths and decays are float32: a decay close to 1 is applied once for each token.
    beta_BSH = jax.nn.sigmoid(contract("BSE,EH->BSH", y_BSE, b.delta_strength).astype(jnp.float32))
    a_BSH = contract("BSE,EH->BSH", y_BSE, b.delta_decay).astype(jnp.float32)
    rate_H, bias_H = (x.astype(jnp.float32) for x in (b.decay_rate, b.decay_bias))
    g_BSH = -jnp.exp(rate_H) * jax.nn.softplus(a_BSH + bias_H)
    q_BSKD, k_BSKD, v_BSHW = residual(q_BSKD, "query"), residual(k_BSKD, "key"), residual(v_BSHW, "value")
    out_BSHW = recurrence.delta(DeltaInputs(q_BSKD, k_BSKD, v_BSHW, g_BSH, beta_BSH))
    gate_BSHW = silu(contract("BSE,EHW->BSHW", y_BSE, b.delta_gate).astype(jnp.float32))
    out_BSHW = layers.rms_norm(out_BSHW, b.delta_norm, c.norm_eps).astype(jnp.float32) * gate_BSHW
    return contract("BSHW,HWE->BSE", constrain(out_BSHW.astype(y_BSE.dtype), "BSHW"), b.delta_out)


def filtered(block: Block[jax.Array], y_BSE: jax.Array, recurrence: Recurrence) -> jax.Array:
    """Return the output of a layer with a short convolution, [B, S, E], before it is added to the residual stream."""
    b = block
    assert b.filter_gate and b.filter_out_gate and b.filter_input and b.filter_out  # noqa: PT018
    assert b.filter is not None
    x_BSHD = contract("BSE,EHD->BSHD", y_BSE, b.filter_input) * contract("BSE,EHD->BSHD", y_BSE, b.filter_gate)
    x_BSHD = recurrence.convolve("filter", residual(x_BSHD, "value"), b.filter)
    x_BSHD = x_BSHD * contract("BSE,EHD->BSHD", y_BSE, b.filter_out_gate)
    return contract("BSHD,HDE->BSE", constrain(x_BSHD, "BSHD"), b.filter_out)
