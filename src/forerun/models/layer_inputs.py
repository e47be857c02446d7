"""Per-layer embeddings (Gemma 4 E2B and E4B): every layer gets an own small embedding of each token.

Letters: L layers, B batch, S sequence, E embed, V vocab, P width of a layer's embedding, Y = L x P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.models.layer_kinds import Section
from forerun.nn import layers
from forerun.nn.sharding import constrain
from forerun.nn.weights.dense import Dense, contract


def layer_inputs(
    params: Any, tokens_BS: jax.Array, x_BSE: jax.Array, norm: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Return the embedding of each token in each layer, [L, B, S, P].

    It is the mean of a row of a table and a projection of the token's normal embedding, times sqrt(2).

    Args:
        params: The model's parameters.
        tokens_BS: The tokens.
        x_BSE: Their scaled embeddings, the input of the first layer.
        norm: The norm function of the model.
    """
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
