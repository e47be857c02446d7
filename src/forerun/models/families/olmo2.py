"""OLMo 2: norms after attention and MLP instead of before, and norms over all heads of q and of k together."""

from __future__ import annotations

from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import tensor
from forerun.models.sizes import DecoderConfig


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    theta, scaling = s.rope(10_000.0)
    bias = bool(s.take("attention_bias", False))
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-5),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        norm_heads_together=True,
        norms="after",
        rope_theta=theta,
        rope_scaling=scaling,
    )


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    tensor(base.SELF + "q_norm.weight", "blocks.query_norm", "(HD)"),
    tensor(base.SELF + "k_norm.weight", "blocks.key_norm", "(KD)"),
    *base.GATED_MLP,
    tensor("model.layers.{}.post_attention_layernorm.weight", "blocks.attention_post_norm", "E"),
    tensor("model.layers.{}.post_feedforward_layernorm.weight", "blocks.mlp_post_norm", "E"),
)
FAMILY = base.Family("olmo2", "Olmo2ForCausalLM", read, TABLE)
