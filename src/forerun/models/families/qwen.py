"""Dense Qwen models: Llama with an optional window in the upper layers.

Qwen2 and Qwen2.5 have biases on q, k and v. Qwen3 has a norm on the heads of q and k.
"""

from __future__ import annotations

from typing import Any

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings, rope_json
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope


def windowed(s: Settings, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of DecoderConfig for RoPE and windows, as Qwen's config.json defines them."""
    theta, scaling = s.rope(10_000.0)
    windows = base.window_of_layers(s, sizes["layers"], s.take("sliding_window", 4096))
    rope = {"rope_theta": theta, "rope_scaling": scaling}
    if set(windows) == {None}:
        return rope
    kinds = [LayerKind(window, Rope(theta, sizes["head_dim"], scaling)) for window in windows]
    return rope | {"kinds": base.repeated(kinds)}


def read_qwen2(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    s.only("use_mrope", False, default=False)
    sizes = base.dimensions(s, tied=False, eps=1e-6)
    return DecoderConfig(**sizes, qkv_bias=True, **windowed(s, sizes))


def write_qwen2(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {
        "use_sliding_window": False,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
    }


def read_qwen3(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=False, eps=1e-6, head_dim=128)
    bias = bool(s.take("attention_bias", False))
    return DecoderConfig(**sizes, qkv_bias=bias, out_bias=bias, qk_norm=True, **windowed(s, sizes))


def write_qwen3(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "use_sliding_window": False,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
    }


QWEN2_TABLE = (*base.EMBEDDING, *base.PROJECTIONS, *base.BIASES, *base.GATED_MLP, *base.NORMS_BEFORE)
QWEN2 = base.Family("qwen2", "Qwen2ForCausalLM", read_qwen2, QWEN2_TABLE, write_qwen2)
QWEN3_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.HEAD_NORMS,
    *base.GATED_MLP,
    *base.NORMS_BEFORE,
)
QWEN3 = base.Family("qwen3", "Qwen3ForCausalLM", read_qwen3, QWEN3_TABLE, write_qwen3)
