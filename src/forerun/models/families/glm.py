"""GLM-4 and ERNIE 4.5: RoPE rotates neighbouring dimensions. GLM-4 rotates only a part of each head.

Their config.json does not have the order of the dimensions, so these families cannot be read as Llama.
"""

from __future__ import annotations

from typing import Any

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import tensor
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope


def _glm(s: Settings) -> dict[str, Any]:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=False, eps=1.5625e-7, head_dim=128)
    share = s.take("partial_rotary_factor") or s.rope_value("partial_rotary_factor") or 0.5
    return (
        sizes
        | _rope(s, int(sizes["head_dim"] * share), 10_000.0, partial=True)
        | {"qkv_bias": bool(s.take("attention_bias", True))}
    )


def _rope(s: Settings, dims: int, default_theta: float, *, partial: bool) -> dict[str, Any]:
    theta, scaling = s.rope(default_theta, partial=partial)
    kind = LayerKind(None, Rope(theta, dims, scaling, interleaved=True))
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_dims": dims, "kinds": (kind,)}


def read_glm(s: Settings) -> DecoderConfig:
    return DecoderConfig(**_glm(s))


def read_glm4(s: Settings) -> DecoderConfig:
    return DecoderConfig(**_glm(s), norms="both")


def read_ernie(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    sizes = base.dimensions(s, tied=True, eps=1e-5, head_dim=128)
    bias = bool(s.take("use_bias", False))
    rope = _rope(s, sizes["head_dim"], 500_000.0, partial=False)
    return DecoderConfig(**sizes, **rope, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


GLM_TABLE = (*base.EMBEDDING, *base.PROJECTIONS, *base.BIASES, *base.FUSED_MLP, *base.NORMS_BEFORE)
GLM4_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.FUSED_MLP,
    *base.NORMS_BEFORE,
    tensor("model.layers.{}.post_self_attn_layernorm.weight", "blocks.attention_post_norm", "E"),
    tensor("model.layers.{}.post_mlp_layernorm.weight", "blocks.mlp_post_norm", "E"),
)
ERNIE_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.GATED_MLP,
    *base.MLP_BIASES,
    *base.NORMS_BEFORE,
)
GLM = base.Family("glm", "GlmForCausalLM", read_glm, GLM_TABLE)
GLM4 = base.Family("glm4", "Glm4ForCausalLM", read_glm4, GLM4_TABLE)
ERNIE = base.Family("ernie4_5", "Ernie4_5ForCausalLM", read_ernie, ERNIE_TABLE)
