"""Mixture of experts in every layer: Qwen3-MoE, Mixtral and OLMoE with softmax routing, MiniMax-M2, and gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.decoder_config import ClampedGate, DecoderConfig, ExpertConfig
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import EXPERT, Tensor, interleaved, tensor
from forerun.models.sizes import GPT_OSS_YARN
from forerun.nn.rope import Rope, Yarn

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
    s.only("decoder_sparse_step", 1, default=1)
    s.only("mlp_only_layers", [], default=[])
    sizes = base.dimensions(s, tied=False, eps=1e-6)
    biases, rope = base.biases(s), base.rope(s, 10_000.0)
    experts = experts_of(s, count=128, top=8, mlp=s.take("moe_intermediate_size", 768), balance_loss=0.001)
    window = s.take("sliding_window", 4096)
    s.take("max_window_layers")  # it has no effect in transformers: a window is in all layers
    return DecoderConfig(
        **sizes,
        **biases,
        **rope,
        qk_norm=True,
        window=window if s.take("use_sliding_window", False) else None,
        experts=experts,
    )


def write_qwen3_moe(c: DecoderConfig) -> dict[str, Any]:
    assert c.experts is not None
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "use_sliding_window": c.window is not None,
        "sliding_window": c.window,
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
    s.only("router_jitter_noise", 0.0, default=0.0)
    rope, sizes = base.rope(s, 1_000_000.0), base.dimensions(s, tied=False, eps=1e-5)
    experts = experts_of(s, count=8, top=2, mlp=sizes["mlp"], balance_loss=0.001, normalised=True)
    return DecoderConfig(**sizes, **rope, window=s.take("sliding_window"), experts=experts)


def read_olmoe(s: Settings) -> DecoderConfig:
    """Return the dimensions of OLMoE: norms over all heads of q and of k together, and experts."""
    s.only("clip_qkv", None)
    rope, sizes = base.rope(s, 10_000.0), base.dimensions(s, tied=False, eps=1e-5)
    return DecoderConfig(
        **sizes,
        **base.biases(s),
        **rope,
        qk_norm=True,
        norm_heads_together=True,
        experts=experts_of(s, count=64, top=8, mlp=sizes["mlp"], balance_loss=0.01),
    )


def read_minimax_m2(s: Settings) -> DecoderConfig:
    """Return the dimensions of MiniMax-M2. Published files describe its routing in keys that transformers ignores."""
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
    rope = base.rope(s, 5_000_000.0, partial=True)
    experts = experts_of(s, count=256, top=8, mlp=sizes["mlp"], balance_loss=0.001, normalised=True)
    return DecoderConfig(
        **sizes,
        qk_norm=True,
        norm_heads_together=True,
        **rope,
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
    *base.JOINT_HEAD_NORMS,
    *QWEN_EXPERTS,
    *base.NORMS_BEFORE,
)
MINIMAX_M2_TABLE = (
    *MIXTRAL_TABLE,
    *base.JOINT_HEAD_NORMS,
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


# ---- gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped gate ----


GPT_OSS_THETA = 150_000.0


def read_gpt_oss(s: Settings) -> DecoderConfig:
    theta, scaling = s.rope(GPT_OSS_THETA)
    if not s.has_rope_section:
        scaling = GPT_OSS_YARN  # the default of transformers
    sizes = base.dimensions(s, tied=False, eps=1e-5, head_dim=64)
    rope, window = Rope(theta, sizes["head_dim"], scaling), base.window_or(s, 128)
    types = base.periodic_types(sizes["layers"], 2)
    kinds = base.windowed_kinds(s, types, full=rope, sliding=rope, window=window)
    experts = experts_of(s, count=128, top=4, mlp=sizes["mlp"], balance_loss=0.001, normalised=True)
    # Published files repeat two settings under the names of OpenAI's own code.
    s.only("experts_per_token", experts.top, default=experts.top)
    original = scaling.original if isinstance(scaling, Yarn) else None
    s.only("initial_context_length", original, default=original)
    bias = bool(s.take("attention_bias", True))
    clamped = ClampedGate(float(s.take("swiglu_alpha", 1.702)), float(s.take("swiglu_limit", 7.0)))
    return DecoderConfig(
        **sizes,
        qkv_bias=bias,
        out_bias=bias,
        attention_sinks=True,
        rope_theta=theta,
        rope_scaling=scaling,
        kinds=kinds,
        experts=replace(experts, bias=True, clamped=clamped),
    )


def write_gpt_oss(c: DecoderConfig) -> dict[str, Any]:
    assert c.experts is not None
    assert c.experts.clamped is not None
    kinds = c.all_kinds
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "sliding_window": window,
        "layer_types": ["full_attention" if kind.window is None else "sliding_attention" for kind in kinds],
        "num_local_experts": c.experts.count,
        "num_experts_per_tok": c.experts.top,
        "router_aux_loss_coef": c.experts.balance_loss,
        "swiglu_alpha": c.experts.clamped.alpha,
        "swiglu_limit": c.experts.clamped.limit,
    }


_EXPERTS = base.MLP + "experts."
GPT_OSS_TABLE = (
    *base.EMBEDDING,
    *base.PROJECTIONS,
    *base.BIASES,
    tensor(base.SELF + "sinks", "blocks.sinks", "H"),
    tensor(base.MLP + "router.weight", "blocks.router", "X E"),
    tensor(base.MLP + "router.bias", "blocks.router_bias", "X"),
    # The columns of gate and up alternate. Matrices have their inputs first.
    interleaved(_EXPERTS + "gate_up_proj", ("blocks.expert_gate", "X E M"), ("blocks.expert_up", "X E M"), along=2),
    interleaved(
        _EXPERTS + "gate_up_proj_bias", ("blocks.expert_gate_bias", "X M"), ("blocks.expert_up_bias", "X M"), along=1
    ),
    tensor(_EXPERTS + "down_proj", "blocks.expert_down", "X M E"),
    tensor(_EXPERTS + "down_proj_bias", "blocks.expert_down_bias", "X E"),
    *base.NORMS_BEFORE,
)
GPT_OSS = base.Family("gpt_oss", "GptOssForCausalLM", read_gpt_oss, GPT_OSS_TABLE, write_gpt_oss)
