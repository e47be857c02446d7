"""gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.decoder_config import ClampedGate, DecoderConfig
from forerun.models.families import base
from forerun.models.families.experts import experts_of
from forerun.models.families.settings import Settings, rope_json
from forerun.models.keys import interleaved, tensor
from forerun.models.layer_kinds import LayerKind
from forerun.models.sizes import GPT_OSS_YARN
from forerun.nn.rope import Rope, Yarn

THETA = 150_000.0


def read(s: Settings) -> DecoderConfig:
    s.only("hidden_act", "silu", default="silu")
    theta, scaling = s.rope(THETA)
    if s.take("rope_parameters") is None and s.take("rope_scaling") is None:
        scaling = GPT_OSS_YARN  # the default of transformers
    sizes = base.dimensions(s, tied=False, eps=1e-5, head_dim=64)
    layers, window = sizes["layers"], base.window_or(s, 128)
    default = ["sliding_attention" if n % 2 == 0 else "full_attention" for n in range(layers)]
    rope = Rope(theta, sizes["head_dim"], scaling)
    kinds = base.kinds_of_types(
        s, layers, default, {"sliding_attention": LayerKind(window, rope), "full_attention": LayerKind(None, rope)}
    )
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
        kinds=base.repeated(kinds),
        experts=replace(experts, bias=True, clamped=clamped),
    )


def write(c: DecoderConfig) -> dict[str, Any]:
    assert c.experts is not None
    assert c.experts.clamped is not None
    kinds = c.all_kinds
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    return base.plain_json(c) | {
        "head_dim": c.head_dim,
        "attention_bias": c.qkv_bias,
        "sliding_window": window,
        "layer_types": ["full_attention" if kind.window is None else "sliding_attention" for kind in kinds],
        "rope_parameters": rope_json(c.rope_theta, c.rope_scaling),
        "num_local_experts": c.experts.count,
        "num_experts_per_tok": c.experts.top,
        "router_aux_loss_coef": c.experts.balance_loss,
        "swiglu_alpha": c.experts.clamped.alpha,
        "swiglu_limit": c.experts.clamped.limit,
    }


_EXPERTS = base.MLP + "experts."
TABLE = (
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
FAMILY = base.Family("gpt_oss", "GptOssForCausalLM", read, TABLE, write)
