"""OLMo 2 and 3: norms after attention and MLP instead of before, and norms over all heads of q and of k together.

OLMo 3 also has a window in three of four layers. Its RoPE scaling applies only to the layers without a window.
"""

from __future__ import annotations

from typing import Any

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import tensor
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope


def _common(s: Settings) -> dict[str, Any]:
    s.only("hidden_act", "silu", default="silu")
    bias = bool(s.take("attention_bias", False))
    return base.dimensions(s, tied=False, eps=1e-5) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "norm_heads_together": True,
        "norms": "after",
    }


def read(s: Settings) -> DecoderConfig:
    theta, scaling = s.rope(10_000.0)
    return DecoderConfig(**_common(s), rope_theta=theta, rope_scaling=scaling)


def read_olmo3(s: Settings) -> DecoderConfig:
    common = _common(s)
    layers, head_dim = common["layers"], common["head_dim"]
    far, scaling = s.rope(500_000.0, "full_attention")
    near, near_scaling = far, None
    nested = s.take("rope_parameters")
    if nested is not None and "full_attention" in nested:
        near, near_scaling = s.rope(500_000.0, "sliding_attention")
    elif nested is not None and scaling is not None:
        # Some releases of transformers wrote this section and scaled all layers, unlike the trained models.
        raise s.refused("rope_parameters that are scaled and not separate for each layer type")
    kinds = {
        "full_attention": LayerKind(None, Rope(far, head_dim, scaling)),
        "sliding_attention": LayerKind(base.window_or(s, 4096), Rope(near, head_dim, near_scaling)),
    }
    types = ["sliding_attention" if (n + 1) % 4 else "full_attention" for n in range(layers)]
    found = base.kinds_of_types(s, layers, types, kinds)
    return DecoderConfig(**common, rope_theta=far, rope_scaling=scaling, kinds=base.repeated(found))


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    tensor(base.SELF + "q_norm.weight", "blocks.query_norm", "(HD)"),
    tensor(base.SELF + "k_norm.weight", "blocks.key_norm", "(KD)"),
    *base.GATED_MLP,
    *base.NORMS_AFTER,
)
OLMO3 = base.Family("olmo3", "Olmo3ForCausalLM", read_olmo3, TABLE)
FAMILY = base.Family("olmo2", "Olmo2ForCausalLM", read, TABLE)
