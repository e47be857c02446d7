"""Llama 2 and 3, SmolLM2, and other models with the same tensors: Seed-OSS, and CWM with windows."""

from __future__ import annotations

from typing import Any

from forerun.config.schema import RopeScaling
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings, rope_json
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope


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


def read_seed_oss(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    theta, scaling = s.rope(10_000.0)
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-6, head_dim=128),
        qkv_bias=bool(s.take("attention_bias", True)),
        out_bias=bool(s.take("attention_out_bias", False)),
        mlp_bias=bool(s.take("mlp_bias", False)),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def read_cwm(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=False, eps=1e-5, head_dim=128)
    theta, scaling = s.rope(1_000_000.0)
    if s.take("rope_parameters") is None and s.take("rope_scaling") is None:
        scaling = RopeScaling(factor=16.0, low=1.0, high=4.0, original=8192)
    rope = Rope(theta, sizes["head_dim"], scaling)
    kinds = {
        "full_attention": LayerKind(None, rope),
        "sliding_attention": LayerKind(base.window_or(s, 8192), rope),
    }
    types = ["sliding_attention" if n % 4 else "full_attention" for n in range(sizes["layers"])]
    found = base.kinds_of_types(s, sizes["layers"], types, kinds)
    return DecoderConfig(
        **sizes,
        mlp_bias=bool(s.take("mlp_bias", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        kinds=base.repeated(found),
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
SEED_OSS = base.Family("seed_oss", "SeedOssForCausalLM", read_seed_oss, TABLE)
CWM = base.Family("cwm", "CwmForCausalLM", read_cwm, TABLE)
FAMILY = base.Family("llama", "LlamaForCausalLM", read, TABLE, write)
