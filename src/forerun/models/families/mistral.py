"""Mistral: Llama with a sliding window in every layer. Ministral 3: queries also have a temperature by position."""

from __future__ import annotations

from typing import Any

from forerun.models.decoder_config import DecoderConfig, QueryTemperature
from forerun.models.families import base
from forerun.models.families.settings import Settings, rope_json
from forerun.nn.rope import Yarn


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    theta, scaling = s.rope(10_000.0)
    window = base.window_or(s, 4096)
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-6), window=window, rope_theta=theta, rope_scaling=scaling
    )


def read_ministral3(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    beta, original = s.rope_value("llama_4_scaling_beta"), s.rope_value("original_max_position_embeddings")
    theta, scaling = s.rope(1_000_000.0, elsewhere=("llama_4_scaling_beta", "max_position_embeddings"))
    if s.take("rope_parameters") is None and s.take("rope_scaling") is None:
        beta, original = 0.1, 16_384
        scaling = Yarn(factor=16.0, original=original)
    if beta is not None and original is None:
        raise s.refused("llama_4_scaling_beta without original_max_position_embeddings")
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-5, head_dim=128),
        window=s.take("sliding_window"),
        rope_theta=theta,
        rope_scaling=scaling,
        query_temperature=None if beta is None else QueryTemperature(float(beta), int(original)),
    )


def write(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "sliding_window": c.window,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
    }


TABLE = (*base.EMBEDDING, *base.PROJECTIONS, *base.GATED_MLP, *base.NORMS_BEFORE)
MINISTRAL3 = base.Family("ministral3", "Ministral3ForCausalLM", read_ministral3, TABLE)
FAMILY = base.Family("mistral", "MistralForCausalLM", read, TABLE, write)
