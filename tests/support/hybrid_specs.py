"""Specs of a model with two kinds of layers: one of full attention after three that are linear, and a tail of one."""

from __future__ import annotations

from typing import Any

from forerun.models.keys import Stack
from forerun.nn.spec import Fill, ParamSpec
from forerun.nn.weights.dense import Dense

E, H, F = 8, 12, 20  # width, outputs of the projections, MLP
NAMES = {
    "blocks.query": "model.layers.{}.self_attn.q_proj",
    "blocks.delta_in": "model.layers.{}.linear_attn.in_proj_qkv",
    "blocks.delta_out": "model.layers.{}.linear_attn.out_proj",
    "blocks.down": "model.layers.{}.mlp.down_proj",
    "layer_projection": "model.per_layer_model_projection",
}


def stacks() -> tuple[Stack, ...]:
    numbers = {"blocks.full": (3, 7), "blocks.linear": (0, 1, 2, 4, 5, 6), "tail.linear": (8,)}
    return tuple(Stack(name, layers) for name, layers in numbers.items())


def matrix(layers: int, inputs: int, outputs: int) -> Dense[ParamSpec]:
    shape, axes = ((layers, inputs, outputs), "LEF") if layers else ((inputs, outputs), "EF")
    return Dense(ParamSpec(shape, axes, Fill(0.0)))


def specs() -> dict[str, Any]:
    full = {"query": matrix(2, E, H), "down": matrix(2, F, E)}
    delta = {"delta_in": matrix(6, E, H), "delta_out": matrix(6, H, E), "down": matrix(6, F, E)}
    tail = {"delta_in": matrix(1, E, H), "delta_out": matrix(1, H, E), "down": matrix(1, F, E)}
    norm = ParamSpec((E,), "E", Fill(1.0))
    return {
        "embed": ParamSpec((30, E), "VE", Fill(0.0)),
        "blocks": {"full": full, "linear": {**delta, "norm": norm}},
        "tail": {"linear": tail},
        "layer_projection": matrix(0, E, F),
    }
