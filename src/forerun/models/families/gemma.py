"""Gemma 2, Gemma 3 (text) and VaultGemma: a scaled embedding, norms around one, alternating local and global layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import tensor
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope


def _common(s: Settings) -> dict[str, Any]:
    # `hidden_act` may be absent or repeat `hidden_activation`. Both must be the tanh approximation of GELU.
    s.only("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    s.only("hidden_act", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    s.only("use_bidirectional_attention", False, default=False)
    sizes = base.dimensions(s, tied=True, eps=1e-6, head_dim=256)
    bias = bool(s.take("attention_bias", False))
    return sizes | {
        "qkv_bias": bias,
        "out_bias": bias,
        "norms": "both",
        "norm_around_one": True,
        "activation": "gelu",
        "embed_scale": sizes["embed"] ** 0.5,
        "query_scale": float(s.take("query_pre_attn_scalar", 256)) ** -0.5,
    }


def read_gemma2(s: Settings) -> DecoderConfig:
    sizes = _common(s)
    theta, scaling = s.rope(10_000.0)
    window = s.take("sliding_window", 4096)
    types = s.take("layer_types", ["full_attention" if n % 2 else "sliding_attention" for n in range(sizes["layers"])])
    rope = Rope(theta, sizes["head_dim"], scaling)
    types = base.known_types(s, types, sizes["layers"])
    kinds = [LayerKind(window if kind == "sliding_attention" else None, rope) for kind in types]
    return DecoderConfig(
        **sizes,
        rope_theta=theta,
        rope_scaling=scaling,
        attention_softcap=_cap(s, "attn_logit_softcapping", 50.0),
        logit_softcap=_cap(s, "final_logit_softcapping", 30.0),
        kinds=base.repeated(kinds),
    )


def read_vaultgemma(s: Settings) -> DecoderConfig:
    """Return the dimensions of VaultGemma: Gemma 2 without the norms after attention and MLP."""
    return replace(read_gemma2(s), norms="before")


def read_gemma3(s: Settings) -> DecoderConfig:
    sizes = _common(s)
    layers, every = sizes["layers"], s.take("sliding_window_pattern", s.take("_sliding_window_pattern", 6))
    types = s.take("layer_types", ["sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)])
    types = base.known_types(s, types, layers)
    nested = s.take("rope_parameters")
    far, far_scaling = s.rope(1_000_000.0, "full_attention")
    near, near_scaling = float(s.take("rope_local_base_freq", 10_000.0)), None
    if nested is not None:
        near, near_scaling = s.rope(10_000.0, "sliding_attention")
    ropes = {
        "full_attention": LayerKind(None, Rope(far, sizes["head_dim"], far_scaling)),
        "sliding_attention": LayerKind(s.take("sliding_window", 4096), Rope(near, sizes["head_dim"], near_scaling)),
    }
    return DecoderConfig(
        **sizes,
        qk_norm=True,
        rope_theta=far,
        rope_scaling=far_scaling,
        attention_softcap=_cap(s, "attn_logit_softcapping", None),
        logit_softcap=_cap(s, "final_logit_softcapping", None),
        kinds=base.repeated([ropes[kind] for kind in types]),
    )


def _cap(s: Settings, key: str, default: float | None) -> float | None:
    """Return a soft cap: None if the key is null, or the family's default if it is missing."""
    value = s.take(key, None if key in s.config else default)
    return None if value is None else float(value)


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.HEAD_NORMS,
    *base.GATED_MLP,
    *base.NORMS_BOTH,
)
VAULT_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.GATED_MLP,
    tensor("model.layers.{}.input_layernorm.weight", "blocks.attention_norm", "E"),
    tensor("model.layers.{}.pre_feedforward_layernorm.weight", "blocks.mlp_norm", "E"),
)
GEMMA2 = base.Family("gemma2", "Gemma2ForCausalLM", read_gemma2, TABLE)
GEMMA3 = base.Family("gemma3_text", "Gemma3ForCausalLM", read_gemma3, TABLE)
VAULT = base.Family("vaultgemma", "VaultGemmaForCausalLM", read_vaultgemma, VAULT_TABLE)
