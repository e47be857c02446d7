"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from forerun.models.families import base
from forerun.models.families.settings import Settings, rope_json
from forerun.models.sizes import DecoderConfig


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    theta, scaling = s.rope(10_000.0)
    # A missing window means 4096, and null means no window. Published checkpoints have both.
    window = s.take("sliding_window", None if "sliding_window" in s.config else 4096)
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-6), window=window, rope_theta=theta, rope_scaling=scaling
    )


def write(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "sliding_window": c.window,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
    }


TABLE = (*base.EMBEDDING, *base.PROJECTIONS, *base.GATED_MLP, *base.NORMS_BEFORE)
FAMILY = base.Family("mistral", "MistralForCausalLM", read, TABLE, write)
