"""Mixture of experts in every layer: Qwen3-MoE, Mixtral and OLMoE with softmax routing, MiniMax-M2 with sigmoids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings, rope_json
from forerun.models.keys import EXPERT, Tensor, tensor

WITHOUT_EFFECT = ("output_router_logits",)  # whether transformers adds the balance loss; a job decides it here


def expert_count(s: Settings, default: int) -> int:
    """Return the number of experts. transformers renamed the key, so a file may have either name."""
    named = {s.take(key) for key in ("num_experts", "num_local_experts")} - {None}
    if len(named) > 1:
        raise s.refused(f"num_experts and num_local_experts that differ: {sorted(named)}")
    return int(named.pop()) if named else default


def experts_of(
    s: Settings, *, count: int, top: int, mlp: int, balance_loss: float, normalised: bool | None = None
) -> ExpertConfig:
    """Return the experts of a config.json. The arguments are the family's defaults.

    Args:
        s: The file.
        count: The number of experts.
        top: The number of experts per token.
        mlp: The width inside the MLP of an expert.
        balance_loss: The coefficient of the load-balancing loss.
        normalised: Whether the weights of a token's experts are divided by their sum; None: `norm_topk_prob` says it.
    """
    count, top = expert_count(s, count), s.take("num_experts_per_tok", top)
    if top > count:
        raise s.refused(f"num_experts_per_tok: {top} of {count} experts")
    return ExpertConfig(
        count,
        top,
        mlp,
        normalised=bool(s.take("norm_topk_prob", False)) if normalised is None else normalised,
        balance_loss=float(s.take("router_aux_loss_coef", balance_loss)),
    )


def read_qwen3_moe(s: Settings) -> DecoderConfig:
    """Return the dimensions of Qwen3-MoE: Qwen3 with experts. `intermediate_size` is not used."""
    s.only("hidden_act", "silu", default="silu")
    s.only("decoder_sparse_step", 1, default=1)
    s.only("mlp_only_layers", [], default=[])
    sizes = base.dimensions(s, tied=False, eps=1e-6)
    bias = bool(s.take("attention_bias", False))
    experts = experts_of(s, count=128, top=8, mlp=s.take("moe_intermediate_size", 768), balance_loss=0.001)
    theta, scaling = s.rope(10_000.0)
    window = s.take("sliding_window", 4096)
    s.take("max_window_layers")  # it has no effect in transformers: a window is in all layers
    return DecoderConfig(
        **sizes,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        window=window if s.take("use_sliding_window", False) else None,
        rope_theta=theta,
        rope_scaling=scaling,
        experts=experts,
    )


def write_qwen3_moe(c: DecoderConfig) -> dict[str, Any]:
    assert c.experts is not None
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "use_sliding_window": c.window is not None,
        "sliding_window": c.window,
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
        "num_experts": c.experts.count,
        "num_experts_per_tok": c.experts.top,
        "moe_intermediate_size": c.experts.mlp,
        "norm_topk_prob": c.experts.normalised,
        "router_aux_loss_coef": c.experts.balance_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def read_mixtral(s: Settings) -> DecoderConfig:
    """Return the dimensions of Mixtral: Mistral with experts of width `intermediate_size`."""
    s.only("hidden_act", "silu", default="silu")
    s.only("router_jitter_noise", 0.0, default=0.0)
    theta, scaling = s.rope(1_000_000.0)
    sizes = base.dimensions(s, tied=False, eps=1e-5)
    experts = experts_of(s, count=8, top=2, mlp=sizes["mlp"], balance_loss=0.001, normalised=True)
    return DecoderConfig(
        **sizes, window=s.take("sliding_window"), rope_theta=theta, rope_scaling=scaling, experts=experts
    )


def read_olmoe(s: Settings) -> DecoderConfig:
    """Return the dimensions of OLMoE: norms over all heads of q and of k together, and experts."""
    s.only("hidden_act", "silu", default="silu")
    s.only("clip_qkv", None)
    theta, scaling = s.rope(10_000.0)
    sizes = base.dimensions(s, tied=False, eps=1e-5)
    bias = bool(s.take("attention_bias", False))
    return DecoderConfig(
        **sizes,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        norm_heads_together=True,
        rope_theta=theta,
        rope_scaling=scaling,
        experts=experts_of(s, count=64, top=8, mlp=sizes["mlp"], balance_loss=0.01),
    )


def read_minimax_m2(s: Settings) -> DecoderConfig:
    """Return the dimensions of MiniMax-M2. Published files describe its routing in keys that transformers ignores."""
    s.only("hidden_act", "silu", default="silu")
    s.only("router_jitter_noise", 0.0, default=0.0)
    s.only("scoring_func", "sigmoid", default="sigmoid")
    s.only("qk_norm_type", "per_layer", default="per_layer")
    for key in ("use_routing_bias", "use_qk_norm"):
        s.only(key, True, default=True)
    for part in ("full_attention", "linear_attention", "mlp"):
        s.only(f"layernorm_{part}_beta", 1.0, default=1.0)
    sizes = base.dimensions(s, tied=False, eps=1e-6, head_dim=128)
    full = [1] * sizes["layers"]
    s.only("attn_type_list", full, default=full)
    outer = s.take("partial_rotary_factor")
    share = s.rope_value("partial_rotary_factor") or outer or 1.0
    dims = s.take("rotary_dim", int(sizes["head_dim"] * share))
    theta, scaling = s.rope(5_000_000.0, partial=True)
    experts = experts_of(s, count=256, top=8, mlp=sizes["mlp"], balance_loss=0.001, normalised=True)
    return DecoderConfig(
        **sizes,
        qk_norm=True,
        norm_heads_together=True,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_dims=dims,
        experts=replace(experts, sigmoid=True),
    )


def expert_table(prefix: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """Return the tensors of the router and of the experts, one per expert and matrix."""
    one = f"{prefix}experts.{EXPERT}."
    return (
        tensor(f"{prefix}gate.weight", "blocks.router", "X E"),
        tensor(f"{one}{gate}.weight", "blocks.expert_gate", "M E"),
        tensor(f"{one}{up}.weight", "blocks.expert_up", "M E"),
        tensor(f"{one}{down}.weight", "blocks.expert_down", "E M"),
    )


QWEN_EXPERTS = expert_table(base.MLP, "gate_proj", "up_proj", "down_proj")
QWEN3_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    *base.HEAD_NORMS,
    *QWEN_EXPERTS,
    *base.NORMS_BEFORE,
)
MIXTRAL_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *expert_table("model.layers.{}.block_sparse_moe.", "w1", "w3", "w2"),
    *base.NORMS_BEFORE,
)
OLMOE_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    tensor(base.SELF + "q_norm.weight", "blocks.query_norm", "(HD)"),
    tensor(base.SELF + "k_norm.weight", "blocks.key_norm", "(KD)"),
    *QWEN_EXPERTS,
    *base.NORMS_BEFORE,
)
MINIMAX_M2_TABLE = (
    *MIXTRAL_TABLE,
    tensor(base.SELF + "q_norm.weight", "blocks.query_norm", "(HD)"),
    tensor(base.SELF + "k_norm.weight", "blocks.key_norm", "(KD)"),
    tensor("model.layers.{}.block_sparse_moe.e_score_correction_bias", "blocks.router_correction", "X"),
)
# The multi-token prediction of published files, and widths of parts that no layer has.
WITHOUT_EFFECT_IN_MINIMAX_M2 = (
    *WITHOUT_EFFECT,
    "use_mtp",
    "num_mtp_modules",
    "mtp_transformer_layers",
    "mlp_intermediate_size",
    "shared_moe_mode",
)
QWEN3_MOE = base.Family("qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe, QWEN3_TABLE, write_qwen3_moe)
_RENAMED = (".block_sparse_moe.", ".mlp.")
MIXTRAL = base.Family("mixtral", "MixtralForCausalLM", read_mixtral, MIXTRAL_TABLE, renamed=_RENAMED)
MINIMAX_M2 = base.Family("minimax_m2", "MiniMaxM2ForCausalLM", read_minimax_m2, MINIMAX_M2_TABLE, renamed=_RENAMED)
OLMOE = base.Family("olmoe", "OlmoeForCausalLM", read_olmoe, OLMOE_TABLE)
