"""The MLP of a decoder layer: one gated MLP, a mixture of experts, or both.

`forerun.models.decoder` explains the letters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from forerun.models.decoder_config import ClampedGate, DecoderConfig, ExpertConfig
from forerun.models.decoder_params import Block
from forerun.nn.compute import residual
from forerun.nn.routing import Router, Routing, choose, expert_mlp
from forerun.nn.weights.dense import contract

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
