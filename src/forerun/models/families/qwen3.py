"""Qwen3: Llama with a norm on the heads of q and k."""

from __future__ import annotations

from typing import Any

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.qwen2 import windowed
from forerun.models.families.settings import Settings, rope_json


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=False, eps=1e-6, head_dim=128)
    bias = bool(s.take("attention_bias", False))
    return DecoderConfig(**sizes, qkv_bias=bias, out_bias=bias, qk_norm=True, **windowed(s, sizes))


def write(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "use_sliding_window": False,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
    }


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.HEAD_NORMS,
    *base.GATED_MLP,
    *base.NORMS_BEFORE,
)
FAMILY = base.Family("qwen3", "Qwen3ForCausalLM", read, TABLE, write)
