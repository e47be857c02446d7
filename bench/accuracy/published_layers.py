"""Layers of published models that forerun's decoder does not have. They are only compiled (tpu_worker.py), never run.

Until February 2024, MaxText's default model had an MLP of two matrices with relu, which ran in parallel with attention:
both read the same normalized input, and their outputs were added. GPT-3 has two matrices with gelu after attention.
"""

from __future__ import annotations

from typing import Any

import jax

from forerun.models import parameter_axes
from forerun.models.decoder import Decoder
from forerun.models.decoder_params import Block
from forerun.nn.compute import residual
from forerun.nn.sharding import constrain
from forerun.nn.weights.dense import contract


def _mlp(block: Any, y_BSE: jax.Array, activation: Any) -> jax.Array:
    wide_BSF = residual(contract("BSE,EF->BSF", y_BSE, block.gate), "mlp_gate")
    return contract("BSF,FE->BSE", activation(wide_BSF), block.down)


def _parallel(self: Any, block: Any, x_BSE: jax.Array, mix: Any) -> jax.Array:
    x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")
    y_BSE = self._norm(x_BSE, block.attention_norm)
    return x_BSE + (mix(block, y_BSE) + _mlp(block, y_BSE, jax.nn.relu))


def _sequential(self: Any, block: Any, x_BSE: jax.Array, mix: Any) -> jax.Array:
    x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")
    x_BSE = x_BSE + mix(block, self._norm(x_BSE, block.attention_norm))
    return x_BSE + _mlp(block, self._norm(x_BSE, block.mlp_norm), jax.nn.gelu)


def use(name: str) -> None:
    """Replace the layers of all decoders in this process by the ones with this name: parallel or sequential."""
    parameter_axes.MLP.pop("up")
    Block.__init__.__kwdefaults__["up"] = None  # type: ignore[index]
    Decoder.block = {"parallel": _parallel, "sequential": _sequential}[name]  # type: ignore[assignment]
