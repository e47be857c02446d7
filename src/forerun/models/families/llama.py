"""Llama 2 and 3, SmolLM2, and other models with the same architecture."""

from __future__ import annotations

from typing import Any

from forerun.models.families import base
from forerun.models.families.settings import Settings, rope_json
from forerun.models.sizes import DecoderConfig


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    theta, scaling = s.rope(10_000.0)
    bias = bool(s.take("attention_bias", False))
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-6),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(s.take("mlp_bias", False)),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def write(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
    }


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.GATED_MLP,
    *base.MLP_BIASES,
    *base.NORMS_BEFORE,
)
FAMILY = base.Family("llama", "LlamaForCausalLM", read, TABLE, write)
