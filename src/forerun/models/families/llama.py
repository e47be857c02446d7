"""Llama, and dense families that differ from it in a few settings: norms, windows, biases, RoPE or factors."""

from __future__ import annotations

from typing import Any

from forerun.config.schema import RopeScaling
from forerun.models.decoder_config import DecoderConfig, QueryTemperature
from forerun.models.families import base
from forerun.models.families.settings import Settings
from forerun.models.keys import fused, tensor
from forerun.models.layer_kinds import LayerKind
from forerun.nn.rope import Rope, Yarn

_BIASED = (*base.EMBEDDING, *base.PROJECTIONS, *base.BIASES)

# ---- Llama 2 and 3, SmolLM2, Seed-OSS, and CWM with windows ----


def read_llama(s: Settings) -> DecoderConfig:
    rope = base.rope(s, 10_000.0)
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-6),
        **base.biases(s),
        mlp_bias=bool(s.take("mlp_bias", False)),
        **rope,
    )


def write_llama(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {"head_dim": c.head_dim, "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}


def read_seed_oss(s: Settings) -> DecoderConfig:
    rope = base.rope(s, 10_000.0)
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-6, head_dim=128),
        qkv_bias=bool(s.take("attention_bias", True)),
        out_bias=bool(s.take("attention_out_bias", False)),
        mlp_bias=bool(s.take("mlp_bias", False)),
        **rope,
    )


def read_cwm(s: Settings) -> DecoderConfig:
    sizes = base.dimensions(s, tied=False, eps=1e-5, head_dim=128)
    theta, scaling = s.rope(1_000_000.0)
    if not s.has_rope_section:
        scaling = RopeScaling(factor=16.0, low=1.0, high=4.0, original=8192)
    rope = Rope(theta, sizes["head_dim"], scaling)
    types = ["sliding_attention" if n % 4 else "full_attention" for n in range(sizes["layers"])]
    return DecoderConfig(
        **sizes,
        mlp_bias=bool(s.take("mlp_bias", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        kinds=base.windowed_kinds(s, types, full=rope, sliding=rope, window=base.window_or(s, 8192)),
    )


LLAMA_TABLE = (*_BIASED, *base.GATED_MLP, *base.MLP_BIASES, *base.NORMS_BEFORE)
LLAMA = base.Family("llama", "LlamaForCausalLM", read_llama, LLAMA_TABLE, write_llama)
SEED_OSS = base.Family("seed_oss", "SeedOssForCausalLM", read_seed_oss, LLAMA_TABLE)
CWM = base.Family("cwm", "CwmForCausalLM", read_cwm, LLAMA_TABLE)

# ---- Dense Qwen: an optional window in the upper layers ----
# Qwen2 and Qwen2.5 have biases on q, k and v. Qwen3 has a norm on the heads of q and k.


def _qwen_windows(s: Settings, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of DecoderConfig for RoPE and windows, as Qwen's config.json defines them."""
    rope = base.rope(s, 10_000.0)
    windows = base.window_of_layers(s, sizes["layers"], s.take("sliding_window", 4096))
    if set(windows) == {None}:
        return rope
    turn = Rope(rope["rope_theta"], sizes["head_dim"], rope["rope_scaling"])
    return rope | {"kinds": base.repeated([LayerKind(window, turn) for window in windows])}


def read_qwen2(s: Settings) -> DecoderConfig:
    s.only("use_mrope", False, default=False)
    sizes = base.dimensions(s, tied=False, eps=1e-6)
    return DecoderConfig(**sizes, qkv_bias=True, **_qwen_windows(s, sizes))


def write_qwen2(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {"use_sliding_window": False}


def read_qwen3(s: Settings) -> DecoderConfig:
    sizes = base.dimensions(s, tied=False, eps=1e-6, head_dim=128)
    return DecoderConfig(**sizes, **base.biases(s), qk_norm=True, **_qwen_windows(s, sizes))


def write_qwen3(c: DecoderConfig) -> dict[str, Any]:
    own = {"head_dim": c.head_dim, "attention_bias": c.qkv_bias, "use_sliding_window": False}
    return base.plain_json(c) | own


QWEN2_TABLE = (*_BIASED, *base.GATED_MLP, *base.NORMS_BEFORE)
QWEN2 = base.Family("qwen2", "Qwen2ForCausalLM", read_qwen2, QWEN2_TABLE, write_qwen2)
QWEN3_TABLE = (*_BIASED, *base.HEAD_NORMS, *base.GATED_MLP, *base.NORMS_BEFORE)
QWEN3 = base.Family("qwen3", "Qwen3ForCausalLM", read_qwen3, QWEN3_TABLE, write_qwen3)

# ---- Mistral: a window in every layer. Ministral 3: queries also have a temperature by position ----


def read_mistral(s: Settings) -> DecoderConfig:
    rope, window = base.rope(s, 10_000.0), base.window_or(s, 4096)
    return DecoderConfig(**base.dimensions(s, tied=False, eps=1e-6), window=window, **rope)


def read_ministral3(s: Settings) -> DecoderConfig:
    beta, original = s.rope_value("llama_4_scaling_beta"), s.rope_value("original_max_position_embeddings")
    theta, scaling = s.rope(1_000_000.0, elsewhere=("llama_4_scaling_beta", "max_position_embeddings"))
    if not s.has_rope_section:
        beta, original = 0.1, 16_384
        scaling = Yarn(factor=16.0, original=original)
    if beta is not None and original is None:
        raise s.refused("llama_4_scaling_beta without original_max_position_embeddings")
    return DecoderConfig(
        **base.dimensions(s, tied=False, eps=1e-5, head_dim=128),
        window=s.take("sliding_window"),
        rope_theta=theta,
        rope_scaling=scaling,
        query_temperature=None if beta is None else QueryTemperature(float(beta), int(original)),
    )


def write_mistral(c: DecoderConfig) -> dict[str, Any]:
    return base.plain_json(c) | {"head_dim": c.head_dim, "sliding_window": c.window}


MISTRAL_TABLE = (*base.EMBEDDING, *base.PROJECTIONS, *base.GATED_MLP, *base.NORMS_BEFORE)
MISTRAL = base.Family("mistral", "MistralForCausalLM", read_mistral, MISTRAL_TABLE, write_mistral)
MINISTRAL3 = base.Family("ministral3", "Ministral3ForCausalLM", read_ministral3, MISTRAL_TABLE)

# ---- SmolLM3: every fourth layer has no position embedding ----


def read_smollm3(s: Settings) -> DecoderConfig:
    sizes = base.dimensions(s, tied=True, eps=1e-6)
    theta, scaling = s.rope(2_000_000.0)
    layers, every = sizes["layers"], s.take("no_rope_layer_interval", 4)
    turning = s.take("no_rope_layers", [int((n + 1) % every != 0) for n in range(layers)])
    if len(turning) != layers:
        raise s.refused(f"no_rope_layers of {len(turning)} for {layers} layers")
    windows: list[int | None] = [None] * layers
    types = s.take("layer_types", ["full_attention" if rope else "sliding_attention" for rope in turning])
    types, window = base.known_types(s, types, layers), s.take("sliding_window")
    if s.take("use_sliding_window", False):
        windows = [window if kind == "sliding_attention" else None for kind in types]
    rope = Rope(theta, sizes["head_dim"], scaling)
    s.take("max_window_layers")
    return DecoderConfig(
        **sizes,
        **base.biases(s),
        mlp_bias=bool(s.take("mlp_bias", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        kinds=base.repeated([LayerKind(windows[n], rope if turning[n] else None) for n in range(layers)]),
    )


SMOLLM3 = base.Family("smollm3", "SmolLM3ForCausalLM", read_smollm3, LLAMA_TABLE)

# ---- Granite: factors for embedding, queries and residual stream, and a divisor of the logits ----
# Granite 4.0 without Mamba layers and experts is the same model with other names for the tensors of its MLP.

_SHARED = "model.layers.{}.shared_mlp."
_ATTENTION = {"attention", "full_attention"}  # transformers 4 and 5
# Settings of parts that a dense model does not have, and of the initialization.
WITHOUT_EFFECT_IN_GRANITE = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok",
    "output_router_logits", "router_aux_loss_coef", "init_method",
)  # fmt: skip


def _granite(s: Settings) -> dict[str, Any]:
    rope, biases = base.rope(s, 10_000.0), base.biases(s)
    return {
        **base.dimensions(s, tied=False, eps=1e-6),
        **biases,
        **rope,
        "embed_scale": float(s.take("embedding_multiplier", 1.0)),
        "query_scale": float(s.take("attention_multiplier", 1.0)),
        "residual_scale": float(s.take("residual_multiplier", 1.0)),
        "logit_divisor": float(s.take("logits_scaling", 1.0)),
    }


def read_granite(s: Settings) -> DecoderConfig:
    return DecoderConfig(**_granite(s), mlp_bias=bool(s.take("mlp_bias", False)))


def read_granite_hybrid(s: Settings) -> DecoderConfig:
    common = _granite(s)
    types = s.take("layer_types", s.take("layers_block_type"))
    if types is None or set(types) - _ATTENTION or len(types) != common["layers"]:
        found = ["mamba"] if types is None else sorted(set(types))
        raise s.refused(f"Mamba layers: layer_types of {found} for {common['layers']} layers")
    s.only("num_local_experts", 0, default=8)
    s.only("normalization_function", "rmsnorm", default="rmsnorm")
    position = s.only("position_embedding_type", "rope", "nope", None)
    kinds = () if position == "rope" else (LayerKind(None, None),)
    return DecoderConfig(**common | {"mlp": s.take("shared_intermediate_size", 1024)}, kinds=kinds)


HYBRID_TABLE = (
    *_BIASED,
    fused(_SHARED + "input_linear.weight", ("blocks.gate", "F E"), ("blocks.up", "F E")),
    tensor(_SHARED + "output_linear.weight", "blocks.down", "E F"),
    *base.NORMS_BEFORE,
)
GRANITE = base.Family("granite", "GraniteForCausalLM", read_granite, LLAMA_TABLE)
GRANITE_HYBRID = base.Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", read_granite_hybrid, HYBRID_TABLE)

# ---- GLM-4 and ERNIE 4.5: RoPE rotates neighbouring dimensions. GLM-4 rotates only a part of each head ----
# Their config.json does not have the order of the dimensions, so these families cannot be read as Llama.


def _glm(s: Settings) -> dict[str, Any]:
    sizes = base.dimensions(s, tied=False, eps=1.5625e-7, head_dim=128)
    share = s.take("partial_rotary_factor") or s.rope_value("partial_rotary_factor") or 0.5
    rope = _interleaved_rope(s, int(sizes["head_dim"] * share), 10_000.0, partial=True)
    return sizes | rope | {"qkv_bias": bool(s.take("attention_bias", True))}


def _interleaved_rope(s: Settings, dims: int, default_theta: float, *, partial: bool) -> dict[str, Any]:
    theta, scaling = s.rope(default_theta, partial=partial)
    kind = LayerKind(None, Rope(theta, dims, scaling, interleaved=True))
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_dims": dims, "kinds": (kind,)}


def read_glm(s: Settings) -> DecoderConfig:
    return DecoderConfig(**_glm(s))


def read_glm4(s: Settings) -> DecoderConfig:
    return DecoderConfig(**_glm(s), norms="both")


def read_ernie(s: Settings) -> DecoderConfig:
    sizes = base.dimensions(s, tied=True, eps=1e-5, head_dim=128)
    bias = bool(s.take("use_bias", False))
    rope = _interleaved_rope(s, sizes["head_dim"], 500_000.0, partial=False)
    return DecoderConfig(**sizes, **rope, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


GLM_TABLE = (*_BIASED, *base.FUSED_MLP, *base.NORMS_BEFORE)
GLM4_TABLE = (
    *GLM_TABLE,
    tensor("model.layers.{}.post_self_attn_layernorm.weight", "blocks.attention_post_norm", "E"),
    tensor("model.layers.{}.post_mlp_layernorm.weight", "blocks.mlp_post_norm", "E"),
)
GLM = base.Family("glm", "GlmForCausalLM", read_glm, GLM_TABLE)
GLM4 = base.Family("glm4", "Glm4ForCausalLM", read_glm4, GLM4_TABLE)
ERNIE = base.Family("ernie4_5", "Ernie4_5ForCausalLM", read_ernie, LLAMA_TABLE)

# ---- Phi-3, Phi-3.5 and Phi-4-mini: fused q, k, v; fused gate and up; LongRope; rotation of a part of each head ----


def read_phi3(s: Settings) -> DecoderConfig:
    sizes = base.dimensions(s, tied=False, eps=1e-5)
    nested = s.take("rope_parameters") or {}
    share = s.take("partial_rotary_factor") or nested.get("partial_rotary_factor") or 1.0
    rope = base.rope(s, 10_000.0, partial=True)
    s.take("original_max_position_embeddings")
    return DecoderConfig(**sizes, window=s.take("sliding_window"), **rope, rope_dims=int(sizes["head_dim"] * share))


PHI3_TABLE = (
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
PHI3 = base.Family("phi3", "Phi3ForCausalLM", read_phi3, PHI3_TABLE)

# ---- OLMo 2 and 3: norms after attention and MLP, and norms over all heads of q and of k together ----
# OLMo 3 also has a window in three of four layers. Its RoPE scaling applies only to the layers without a window.


def _olmo(s: Settings) -> dict[str, Any]:
    biases = base.biases(s)
    own = {"qk_norm": True, "norm_heads_together": True, "norms": "after"}
    return base.dimensions(s, tied=False, eps=1e-5) | biases | own


def read_olmo2(s: Settings) -> DecoderConfig:
    rope = base.rope(s, 10_000.0)
    return DecoderConfig(**_olmo(s), **rope)


def read_olmo3(s: Settings) -> DecoderConfig:
    common = _olmo(s)
    head_dim = common["head_dim"]
    far, scaling = s.rope(500_000.0, "full_attention")
    near, near_scaling = far, None
    nested = s.take("rope_parameters")
    if nested is not None and "full_attention" in nested:
        near, near_scaling = s.rope(500_000.0, "sliding_attention")
    elif nested is not None and scaling is not None:
        # Some releases of transformers wrote this section and scaled all layers, unlike the trained models.
        raise s.refused("rope_parameters that are scaled and not separate for each layer type")
    kinds = base.windowed_kinds(
        s,
        base.periodic_types(common["layers"], 4),
        full=Rope(far, head_dim, scaling),
        sliding=Rope(near, head_dim, near_scaling),
        window=base.window_or(s, 4096),
    )
    return DecoderConfig(**common, rope_theta=far, rope_scaling=scaling, kinds=kinds)


OLMO_TABLE = (*_BIASED, *base.JOINT_HEAD_NORMS, *base.GATED_MLP, *base.NORMS_AFTER)
OLMO2 = base.Family("olmo2", "Olmo2ForCausalLM", read_olmo2, OLMO_TABLE)
OLMO3 = base.Family("olmo3", "Olmo3ForCausalLM", read_olmo3, OLMO_TABLE)

# ---- EXAONE 4: norms after attention and MLP and on the heads of q and k, and RoPE only in layers with a window ----


def read_exaone(s: Settings) -> DecoderConfig:
    sizes = base.dimensions(s, tied=False, eps=1e-5)
    theta, scaling = s.rope(10_000.0)
    window, layers = base.window_or(s, 4096), sizes["layers"]
    types = ["full_attention"] * layers
    if window is not None and s.config.get("layer_types") is None:
        # Published files with a pattern of letters ("LLLG") also have layer_types.
        types = base.periodic_types(layers, s.take("sliding_window_pattern", 4))
    rope = Rope(theta, sizes["head_dim"], scaling)
    kinds = base.windowed_kinds(s, types, full=rope if window is None else None, sliding=rope, window=window)
    return DecoderConfig(**sizes, qk_norm=True, norms="after", rope_theta=theta, rope_scaling=scaling, kinds=kinds)


EXAONE_TABLE = (*base.EMBEDDING, *base.PROJECTIONS, *base.HEAD_NORMS, *base.GATED_MLP, *base.NORMS_AFTER)
EXAONE = base.Family("exaone4", "Exaone4ForCausalLM", read_exaone, EXAONE_TABLE)
