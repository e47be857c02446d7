"""Phi-3, Phi-3.5 and Phi-4-mini: fused q, k, v; fused gate and up; LongRope; rotation of only a part of each head."""

from __future__ import annotations

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import fused, tensor


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=False, eps=1e-5)
    nested = s.take("rope_parameters") or {}
    share = s.take("partial_rotary_factor") or nested.get("partial_rotary_factor") or 1.0
    theta, scaling = s.rope(10_000.0, partial=True)
    s.take("original_max_position_embeddings")
    return DecoderConfig(
        **sizes,
        window=s.take("sliding_window"),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_dims=int(sizes["head_dim"] * share),
    )


TABLE = (
    *base.EMBEDDING,
    fused(
        base.SELF + "qkv_proj.weight",
        ("blocks.query", "(HD) E"),
        ("blocks.key", "(KD) E"),
        ("blocks.value", "(KD) E"),
    ),
    tensor(base.SELF + "o_proj.weight", "blocks.out", "E (HD)"),
    *base.FUSED_MLP,
    *base.NORMS_BEFORE,
)
FAMILY = base.Family("phi3", "Phi3ForCausalLM", read, TABLE)
