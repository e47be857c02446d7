"""Families with recurrent layers beside attention: the gated delta rule of Qwen3.5, and the convolutions of LFM2.

Qwen3.5, 3.6 and 3.8 (text) have attention with a gate in every fourth layer. Every layer has one MLP, or experts and a
shared expert: an MLP for all tokens, whose output a gate scales. The three positions of M-RoPE are equal for text, so
its sections have no effect. transformers ignores the weights of the multi-token prediction (`mtp.*`), too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.decoder_config import DecoderConfig
from forerun.models.families import base, experts
from forerun.models.families.settings import Settings
from forerun.models.keys import fused, tensor
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.models.sizes import delta_shape
from forerun.nn.rope import Rope

SHARE = 0.25  # of each head that RoPE rotates
M_ROPE = ("mrope_section", "mrope_interleaved")
LINEAR, FULL = "linear_attention", "full_attention"
# Keys that do not change the forward pass of the text model. `intermediate_size` of some files with experts is that of
# an MLP that no layer has.
WITHOUT_EFFECT = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers")
WITHOUT_EFFECT_WITH_EXPERTS = (*WITHOUT_EFFECT, *experts.WITHOUT_EFFECT, "intermediate_size")


def read_qwen3_5(s: Settings) -> DecoderConfig:
    return _read_qwen3_5(s, "intermediate_size")


def read_qwen3_5_moe(s: Settings) -> DecoderConfig:
    s.only("norm_topk_prob", True, default=True)
    s.only("decoder_sparse_step", 1, default=1)
    width = s.take("moe_intermediate_size", 512)
    found = experts.experts_of(s, count=256, top=8, mlp=width, balance_loss=0.001, normalised=True)
    return replace(_read_qwen3_5(s, "shared_expert_intermediate_size"), experts=replace(found, shared=True))


def _read_qwen3_5(s: Settings, mlp: str) -> DecoderConfig:
    """Return the dimensions without experts. `mlp` is the key for the width of the MLP that all tokens use."""
    s.only("attn_output_gate", True, default=True)
    s.only("output_gate_type", "swish", "silu", default="swish")
    s.only("mlp_only_layers", [], default=[])
    sizes = base.dimensions(s, tied=False, eps=1e-6, head_dim=256, mlp=mlp)
    nested = s.take("rope_parameters") or {}
    share = nested.get("partial_rotary_factor") or s.take("partial_rotary_factor") or SHARE
    s.take("partial_rotary_factor")
    theta, scaling = s.rope(10_000.0, partial=True, without_effect=M_ROPE)
    layers, interval = sizes["layers"], s.take("full_attention_interval", 4)
    types = s.take("layer_types", [FULL if (n + 1) % interval == 0 else LINEAR for n in range(layers)])
    types = base.known_types(s, types, layers, LINEAR, FULL)
    delta = delta_shape(
        heads=s.take("linear_num_value_heads", 32),
        key_heads=s.take("linear_num_key_heads", 16),
        key_dim=s.take("linear_key_head_dim", 128),
        value_dim=s.take("linear_value_head_dim", 128),
        width=s.take("linear_conv_kernel_dim", 4),
    )
    dims = int(sizes["head_dim"] * share)
    kinds = {
        FULL: LayerKind(None, Rope(theta, dims, scaling), LayerShape("full")),
        LINEAR: LayerKind(None, None, delta),
    }
    return DecoderConfig(
        **sizes,
        **base.biases(s),
        qk_norm=True,
        norm_around_one=True,
        attention_gate=True,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_dims=dims,
        kinds=base.repeated([kinds[kind] for kind in types]),
    )


def write_qwen3_5(c: DecoderConfig) -> dict[str, Any]:
    delta = next(kind.shape for kind in c.layer_kinds if kind.mixer == "delta")
    assert delta is not None
    share = (c.rope_dims or c.head_dim) / c.head_dim
    plain = base.plain_json(c)
    return plain | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "attn_output_gate": True,
        "layer_types": [LINEAR if kind.mixer == "delta" else FULL for kind in c.all_kinds],
        "linear_num_value_heads": delta.heads,
        "linear_num_key_heads": delta.kv_heads,
        "linear_key_head_dim": delta.head_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.width,
        "rope_parameters": plain["rope_parameters"] | {"partial_rotary_factor": share},
    }


def write_qwen3_5_moe(c: DecoderConfig) -> dict[str, Any]:
    assert c.experts is not None
    common = write_qwen3_5(c)
    return common | {
        "shared_expert_intermediate_size": common.pop("intermediate_size"),
        "num_experts": c.experts.count,
        "num_experts_per_tok": c.experts.top,
        "moe_intermediate_size": c.experts.mlp,
        "router_aux_loss_coef": c.experts.balance_loss,
    }


DELTA = "model.layers.{}.linear_attn."
MIXERS = (
    *base.EMBEDDING,
    tensor(base.SELF + "q_proj.weight", "blocks.query", "(HJD) E"),  # query and gate alternate per head
    *base.PROJECTIONS[1:],
    tensor(base.SELF + "q_proj.bias", "blocks.query_bias", "(HJD)"),
    *base.BIASES[1:],
    *base.HEAD_NORMS,
    fused(
        DELTA + "in_proj_qkv.weight",
        ("blocks.delta_query", "(KD) E"),
        ("blocks.delta_key", "(KD) E"),
        ("blocks.delta_value", "(HW) E"),
    ),
    tensor(DELTA + "in_proj_z.weight", "blocks.delta_gate", "(HW) E"),
    tensor(DELTA + "in_proj_b.weight", "blocks.delta_strength", "H E"),
    tensor(DELTA + "in_proj_a.weight", "blocks.delta_decay", "H E"),
    tensor(DELTA + "out_proj.weight", "blocks.delta_out", "E (HW)"),
    fused(
        DELTA + "conv1d.weight",
        ("blocks.query_filter", "(KD) 1 I"),
        ("blocks.key_filter", "(KD) 1 I"),
        ("blocks.value_filter", "(HW) 1 I"),
    ),
    tensor(DELTA + "A_log", "blocks.decay_rate", "H"),
    tensor(DELTA + "dt_bias", "blocks.decay_bias", "H"),
    tensor(DELTA + "norm.weight", "blocks.delta_norm", "W"),
)
QWEN3_5_TABLE = (*MIXERS, *base.GATED_MLP, *base.NORMS_BEFORE)
QWEN3_5 = base.Family("qwen3_5_text", "Qwen3_5ForCausalLM", read_qwen3_5, QWEN3_5_TABLE, write_qwen3_5)

SHARED = base.MLP + "shared_expert."
SHARED_EXPERT = (
    tensor(SHARED + "gate_proj.weight", "blocks.gate", "F E"),
    tensor(SHARED + "up_proj.weight", "blocks.up", "F E"),
    tensor(SHARED + "down_proj.weight", "blocks.down", "E F"),
    tensor(base.MLP + "shared_expert_gate.weight", "blocks.shared_gate", "A E"),
)
# The published files have all experts of a layer in two tensors. transformers writes one tensor per expert and matrix
# for a text model that it has made itself.
FUSED_EXPERTS = (
    tensor(base.MLP + "gate.weight", "blocks.router", "X E"),
    fused(base.MLP + "experts.gate_up_proj", ("blocks.expert_gate", "X M E"), ("blocks.expert_up", "X M E"), along=1),
    tensor(base.MLP + "experts.down_proj", "blocks.expert_down", "X E M"),
)
QWEN3_5_MOE = base.Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    read_qwen3_5_moe,
    (*MIXERS, *FUSED_EXPERTS, *SHARED_EXPERT, *base.NORMS_BEFORE),
    write_qwen3_5_moe,
    other_table=(*MIXERS, *experts.QWEN_EXPERTS, *SHARED_EXPERT, *base.NORMS_BEFORE),
)


# ---- LFM2 and LFM2.5 (dense): layers with a gated short convolution between layers with attention ----


CONVOLUTION = "conv"
# Older names of keys, and keys of the training framework that repeat other keys.
WITHOUT_EFFECT_IN_LFM2 = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu",
    "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "norm_eps", "num_heads",
    "use_pos_enc", "theta",
)  # fmt: skip


def read_lfm2(s: Settings) -> DecoderConfig:
    s.only("conv_bias", False, default=False)
    s.only("use_pos_enc", True, default=True)
    s.only("block_use_swiglu", True, default=True)
    eps = s.take("norm_eps", 1e-5)
    sizes = base.dimensions(s, tied=True, eps=eps)
    sizes["tied"] = bool(s.take("tie_embedding", sizes["tied"]))
    sizes["mlp"] = _lfm2_mlp(s, s.take("block_ff_dim", sizes["mlp"]))
    rope = base.rope(s, 1_000_000.0)
    layers, embed, heads = sizes["layers"], sizes["embed"], sizes["heads"]
    attending = s.take("full_attn_idxs")
    attending = range(layers) if attending is None else attending
    types = s.take("layer_types", [FULL if n in attending else CONVOLUTION for n in range(layers)])
    types = base.known_types(s, types, layers, CONVOLUTION, FULL)
    # Channels of a convolution are independent. They are grouped like heads, so that tp can split them.
    groups = 1 if embed % heads else heads
    width = s.take("conv_L_cache", 3)
    kinds = {
        FULL: LayerKind(None, Rope(rope["rope_theta"], sizes["head_dim"], rope["rope_scaling"]), LayerShape("full")),
        CONVOLUTION: LayerKind(
            None, None, LayerShape("short", "convolution", heads=groups, head_dim=embed // groups, width=width)
        ),
    }
    return DecoderConfig(
        **sizes,
        qk_norm=True,
        **rope,
        kinds=base.repeated([kinds[kind] for kind in types]),
    )


def _lfm2_mlp(s: Settings, given: int) -> int:
    """Return the width of the LFM2_MLP. Unless told otherwise, it is two thirds of the given one, rounded up."""
    factor, multiple = s.take("block_ffn_dim_multiplier", 1.0), s.take("block_multiple_of", 256)
    if not s.take("block_auto_adjust_ff_dim", True):
        return given
    return -(-int(factor * int(2 * given / 3)) // multiple) * multiple


MIXER = "model.layers.{}.conv."
LFM2_MLP = "model.layers.{}.feed_forward."
LFM2_TABLE = (
    tensor("model.embed_tokens.weight", "embed", "V E"),
    tensor("model.embedding_norm.weight", "norm", "E"),
    tensor("lm_head.weight", "head", "V E"),
    *base.PROJECTIONS[:3],
    tensor(base.SELF + "out_proj.weight", "blocks.out", "E (HD)"),
    tensor(base.SELF + "q_layernorm.weight", "blocks.query_norm", "D"),
    tensor(base.SELF + "k_layernorm.weight", "blocks.key_norm", "D"),
    fused(
        MIXER + "in_proj.weight",
        ("blocks.filter_gate", "(HD) E"),
        ("blocks.filter_out_gate", "(HD) E"),
        ("blocks.filter_input", "(HD) E"),
    ),
    tensor(MIXER + "conv.weight", "blocks.filter", "(HD) 1 I"),
    tensor(MIXER + "out_proj.weight", "blocks.filter_out", "E (HD)"),
    tensor(LFM2_MLP + "w1.weight", "blocks.gate", "F E"),
    tensor(LFM2_MLP + "w3.weight", "blocks.up", "F E"),
    tensor(LFM2_MLP + "w2.weight", "blocks.down", "E F"),
    tensor("model.layers.{}.operator_norm.weight", "blocks.attention_norm", "E"),
    tensor("model.layers.{}.ffn_norm.weight", "blocks.mlp_norm", "E"),
)
LFM2 = base.Family("lfm2", "Lfm2ForCausalLM", read_lfm2, LFM2_TABLE)
