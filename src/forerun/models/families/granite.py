"""Granite: Llama with factors for embedding, queries and residual stream, and a divisor of the logits.

Granite 4.0 without Mamba layers and experts is the same model with other names for the tensors of its MLP.
"""

from __future__ import annotations

from typing import Any

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import fused, tensor
from forerun.models.layer_kinds import LayerKind

_SHARED = "model.layers.{}.shared_mlp."
_ATTENTION = {"attention", "full_attention"}  # transformers 4 and 5
# Settings of parts that a dense model does not have, and of the initialization.
WITHOUT_EFFECT = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok",
    "output_router_logits", "router_aux_loss_coef", "init_method",
)  # fmt: skip


def _common(s: Settings) -> dict[str, Any]:
    s.only("hidden_act", "silu", default="silu")
    theta, scaling = s.rope(10_000.0)
    bias = bool(s.take("attention_bias", False))
    return base.dimensions(s, tied=False, eps=1e-6) | {
        "qkv_bias": bias,
        "out_bias": bias,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "embed_scale": float(s.take("embedding_multiplier", 1.0)),
        "query_scale": float(s.take("attention_multiplier", 1.0)),
        "residual_scale": float(s.take("residual_multiplier", 1.0)),
        "logit_divisor": float(s.take("logits_scaling", 1.0)),
    }


def read(s: Settings) -> DecoderConfig:
    return DecoderConfig(**_common(s), mlp_bias=bool(s.take("mlp_bias", False)))


def read_hybrid(s: Settings) -> DecoderConfig:
    common = _common(s)
    types = s.take("layer_types", s.take("layers_block_type"))
    if types is None or set(types) - _ATTENTION or len(types) != common["layers"]:
        found = ["mamba"] if types is None else sorted(set(types))
        raise s.refused(f"Mamba layers: layer_types of {found} for {common['layers']} layers")
    s.only("num_local_experts", 0, default=8)
    s.only("normalization_function", "rmsnorm", default="rmsnorm")
    position = s.only("position_embedding_type", "rope", "nope", None)
    kinds = () if position == "rope" else (LayerKind(None, None),)
    return DecoderConfig(**common | {"mlp": s.take("shared_intermediate_size", 1024)}, kinds=kinds)


TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.GATED_MLP,
    *base.MLP_BIASES,
    *base.NORMS_BEFORE,
)
HYBRID_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    fused(_SHARED + "input_linear.weight", ("blocks.gate", "F E"), ("blocks.up", "F E")),
    tensor(_SHARED + "output_linear.weight", "blocks.down", "E F"),
    *base.NORMS_BEFORE,
)
FAMILY = base.Family("granite", "GraniteForCausalLM", read, TABLE)
HYBRID = base.Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", read_hybrid, HYBRID_TABLE)
