"""config.json as transformers 4 and 5 write it, and what is refused in it: by name and file, never approximated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from families_reference import VARIANTS, YARN, config_for

from forerun.errors import UserError
from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.families.registry import FAMILIES, family_for, read_config
from forerun.models.sizes import SIZES
from forerun.nn.rope import Proportional, Rope

WHERE = "tiny/config.json"
PLAIN = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
ROWS = {
    "llama": "Llama 2, 3.x",
    "qwen2": "Qwen2, 2.5",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "smollm3": "SmolLM3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "vaultgemma": "VaultGemma",
    "gemma4_text": "Gemma 4 31B (text)",
    "gemma4_unified_text": "Gemma 4 12B (text)",
    "phi3": "Phi-3, Phi-4-mini",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "exaone4": "EXAONE 4",
    "seed_oss": "Seed-OSS",
    "cwm": "CWM",
    "ministral3": "Ministral 3",
    "granite": "Granite 3, 4.1",
    "granitemoehybrid": "Granite 4.0 without Mamba",
    "glm": "GLM-4",
    "glm4": "GLM-4",
    "ernie4_5": "ERNIE 4.5",
    "qwen3_5_text": "Qwen3.5, 3.6, 3.8 (dense)",
    "qwen3_5_moe_text": "Qwen3.5, 3.6 (experts)",
    "lfm2": "LFM2, LFM2.5",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "minimax_m2": "MiniMax-M2",
    "gpt_oss": "gpt-oss",
    "gpt2": "GPT-2",
}
ALSO = {"llama": ("SmolLM2",), "gemma4_text": ("Gemma 4 26B-A4B (text)",)}  # other rows of the table
EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "minimax_m2", "qwen3_5_moe_text", "gpt_oss")
ROUTED = (*EXPERTS, "gemma4_text")
DENSE_GRANITE = {"layer_types": ["attention"] * 2, "num_local_experts": 0, "position_embedding_type": "rope"}
MORE = {
    "gemma4_text": {"vocab_size_per_layer_input": 96},  # its default is 262,144
    "granitemoehybrid": DENSE_GRANITE,
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 24},
}
WITH_LAYER_TYPES = ("olmo3", "exaone4", "cwm", "granitemoehybrid", "gpt_oss")  # transformers 4 wrote the key for these


def minimal(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type} | (GPT2 if model_type == "gpt2" else PLAIN) | MORE.get(model_type, {}) | changes


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the keys of transformers 4: what follows from other keys is not written."""
    derived = () if config["model_type"] in WITH_LAYER_TYPES else ("layer_types",)
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype", *derived)}
    if config["model_type"] == "granitemoehybrid":
        old["layer_types"] = ["attention"] * len(config["layer_types"])
    if set(config.get("layer_types") or ()) & {"linear_attention", "conv"}:
        old["layer_types"] = config["layer_types"]
    old |= {"torch_dtype": "float32", "transformers_version": "4.48.0"}
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "olmo3":
        rope = rope["full_attention"]
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern")
    scaling = dict(rope)
    if "rope_theta" in scaling:
        old["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    kind = scaling.pop("rope_type", "default")
    if kind == "longrope":  # the original context stood outside
        scaling.pop("original_max_position_embeddings")
    old["rope_scaling"] = None if kind == "default" else scaling | {"type": kind}
    return old


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("gemma4")])
def test_old_and_new_style_are_one_config(name: str) -> None:
    new = json.loads(config_for(VARIANTS[name]).to_json_string(use_diff=False))
    old = as_transformers_4(new)
    assert old != new
    assert read_config(old, WHERE) == read_config(new, WHERE)


GPT_OSS_20B = {
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "rms_norm_eps": 1e-5, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip


def test_the_published_file_of_gpt_oss_is_the_named_size_and_its_export() -> None:
    family, config = read_config(GPT_OSS_20B, WHERE)
    assert config == SIZES["gpt-oss-20b"]
    assert family.write is not None
    assert read_config(family.write(config) | {"model_type": "gpt_oss"}, WHERE)[1] == config
    assert read_config({**GPT_OSS_20B, "rope_scaling": None, "initial_context_length": None}, WHERE)[1] == config


def test_a_null_width_of_embeddings_per_layer_means_none() -> None:
    """Without the key, the default is that of E2B."""
    given = minimal("gemma4_text", **GEMMA4_EXPERTS)
    _, config = read_config(given | {"hidden_size_per_layer_input": None}, WHERE)
    assert isinstance(config, DecoderConfig)
    assert (config.layer_width, config.experts) == (0, ExpertConfig(4, 2, 24, beside=True))
    assert read_config(given, WHERE)[1].layer_width == 256  # type: ignore[union-attr]


def test_keys_of_the_published_minimax_m2_file() -> None:
    """Its RoPE rotates `rotary_dim` dimensions, and its multi-token prediction has no effect."""
    more = {"rotary_dim": 4, "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
    more |= {"attn_type_list": [1, 1], "shared_intermediate_size": 0, "scoring_func": "sigmoid"}
    _, config = read_config(minimal("minimax_m2", **more), WHERE)
    assert isinstance(config, DecoderConfig)
    assert config.rope_dims == 4
    assert config.experts == ExpertConfig(256, 8, 48, balance_loss=0.001, sigmoid=True)


PUBLISHED = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 8}


@pytest.mark.parametrize("model_type", GEMMA4)
def test_global_layers_of_gemma4_as_published_and_as_transformers_writes_them(model_type: str) -> None:
    written = {"per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}}
    kept = {key: value for key, value in PUBLISHED.items() if "global" not in key}
    _, published = read_config(minimal(model_type, **PUBLISHED), WHERE)
    assert read_config(minimal(model_type, **kept, **written), WHERE)[1] == published
    assert isinstance(published, DecoderConfig)
    local, far = (kind.shape for kind in published.layer_kinds)
    assert local is not None
    assert far is not None
    assert (far.head_dim, far.kv_heads, far.key_is_value) == (16, 1, True)
    assert (local.head_dim, local.kv_heads, local.key_is_value) == (None, None, False)
    assert published.layer_kinds[1].rope == Rope(1e6, 16, Proportional(0.25))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_minimal_config_is_read(model_type: str) -> None:
    """With the dropouts, tokens and dtypes of published files, which have no bearing here."""
    bystanders = {"attention_dropout": 0.1, "resid_pdrop": 0.1, "torch_dtype": "bfloat16", "use_cache": True}
    family, config = read_config(minimal(model_type, **bystanders), WHERE)
    assert (family.model_type, config.layers, config.embed, config.vocab) == (model_type, 2, 32, 96)


@pytest.mark.parametrize("model_type", QWEN3_5)
def test_keys_of_published_qwen3_5_files_have_no_effect(model_type: str) -> None:
    without = {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "output_gate_type": "swish"}
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    given = minimal(model_type, attn_output_gate=True, full_attention_interval=2, mlp_only_layers=[])
    _, config = read_config(given | without | {"rope_parameters": rope}, WHERE)
    assert [kind.mixer for kind in config.layer_kinds] == ["delta", "attention"]  # type: ignore[union-attr]
    assert config == read_config(given | {"rope_theta": 1e7}, WHERE)[1]


@pytest.mark.parametrize("name", ["qwen3.5-35b-a3b", "gemma-4-26b-a4b"])
def test_a_named_size_and_the_exported_config_json_are_the_same(name: str) -> None:
    size = SIZES[name]
    family = family_for(size)
    assert family.write is not None
    assert read_config(family.write(size) | {"model_type": family.model_type}, WHERE) == (family, size)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 32), ({"block_ffn_dim_multiplier": 1.3}, 48), ({"adjust": 0}, 48)]
)
def test_the_mlp_of_lfm2_is_two_thirds_rounded_up(given: dict[str, Any], expected: int) -> None:
    adjust = {"block_auto_adjust_ff_dim": "adjust" not in given, "block_multiple_of": 16}
    changes = {key: value for key, value in given.items() if key != "adjust"}
    _, config = read_config(minimal("lfm2", **adjust, **changes), WHERE)
    assert config.mlp == expected


LLAMA_LIKE = [name for name in FAMILIES if name != "gpt2"]
ACTIVATIONS = {"gpt2": "activation_function"} | dict.fromkeys(
    ("gemma2", "gemma3_text", "vaultgemma", *GEMMA4), "hidden_activation"
)
WITHOUT_PARTIAL = [name for name in LLAMA_LIKE if name not in ("phi3", "glm", "glm4", "minimax_m2", *QWEN3_5)]
DYNAMIC, PARTIAL = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, {"partial_rotary_factor": 0.5}

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [  # family, change, what the error names, in the table
    *((name, {ACTIVATIONS.get(name, "hidden_act"): "relu"}, "relu", "other activations") for name in FAMILIES),
    *((name, {"quantization_config": {"quant_method": "awq"}}, "awq", "quantized weights") for name in FAMILIES),
    *((name, {"num_local_experts": 8}, "num_local_experts: 8", "experts") for name in FAMILIES if name not in ROUTED),
    ("gemma4_text", {"num_local_experts": 8}, "num_local_experts: 8", "experts without their block"),
    *((name, {"from_the_future": "yes"}, "from_the_future: 'yes'", "any unknown key") for name in FAMILIES),
    *((name, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic", "dynamic NTK") for name in LLAMA_LIKE),
    *((name, {"rope_parameters": DYNAMIC}, "dynamic", "dynamic NTK") for name in LLAMA_LIKE),
    *((name, {"pretraining_tp": 2}, "pretraining_tp: 2", "`pretraining_tp`") for name in LLAMA_LIKE),
    *((name, {"rope_parameters": PARTIAL}, "partial_rotary_factor", "partial RoPE") for name in WITHOUT_PARTIAL),
    *((name, PARTIAL, "partial_rotary_factor", "partial RoPE") for name in WITHOUT_PARTIAL),
    ("llama", {"rope_scaling": YARN | {"mscale": 0.7}}, "mscale", "YaRN with `mscale`"),
    ("qwen2", {"use_mrope": True}, "use_mrope", "multimodal RoPE"),
    ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "mrope", "multimodal RoPE"),
    ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention", "other layer types"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types", "other layer types"),
    ("smollm3", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", "other layer types"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers", "other layer types"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", "other layer types"),
    ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", "other layer types"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "bidirectional attention"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "bidirectional attention"),
    ("gemma3_text", {"hidden_act": "silu"}, "silu", "other activations"),
    *((name, {"use_bidirectional_attention": "all"}, "'all'", "bidirectional attention") for name in GEMMA4),
    *((name, {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", "other layer types") for name in GEMMA4),
    *((name, {"num_kv_shared_layers": 2}, "num_kv_shared_layers: 2", "sharing with no layer") for name in GEMMA4),
    *((name, {"rope_parameters": {}}, "rope_parameters", "RoPE for one type of layers") for name in GEMMA4),
    ("gemma4_text", GEMMA4_EXPERTS | {"top_k_experts": 5}, "top_k_experts: 5", "more experts per token"),
    ("gemma4_text", GEMMA4_EXPERTS | {"enable_moe_block": False}, "num_experts: 4", "experts without their block"),
    ("gemma4_text", {"vocab_size_per_layer_input": 97}, "vocab_size_per_layer_input", "a table with other rows"),
    ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config", "layers of one type that differ"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types", "other layer types"),
    ("llama", {"rope_scaling": YARN | {"mscale_all_dim": 0.7}}, "mscale", "YaRN with `mscale`"),
    ("olmo3", {"rope_parameters": YARN}, "rope_parameters", "RoPE settings for all layer types together"),
    ("olmo3", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", "other layer types"),
    ("exaone4", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", "other layer types"),
    ("cwm", {"layer_types": ["full_attention"]}, "layer_types", "other layer types"),
    ("ministral3", {"layer_types": ["full_attention"] * 2}, "layer_types", "other layer types"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta", "temperature alone"),
    ("granitemoehybrid", {"layer_types": ["attention", "mamba"]}, "mamba", "Mamba layers"),
    ("granitemoehybrid", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention", "Mamba layers"),
    ("granitemoehybrid", {"layer_types": None}, "Mamba", "Mamba layers"),
    ("granitemoehybrid", {"layer_types": ["attention"]}, "layer_types", "Mamba layers"),
    ("granitemoehybrid", {"num_local_experts": None}, "num_local_experts: 8", "experts"),
    ("granitemoehybrid", {"normalization_function": "layernorm"}, "layernorm", "other norms"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "alibi", "other positions"),
    *((name, {"layer_types": ["mamba"] * 2}, "mamba", "other layer types") for name in QWEN3_5),
    *((name, {"attn_output_gate": False}, "attn_output_gate", "attention without a gate") for name in QWEN3_5),
    *((name, {"output_gate_type": "sigmoid"}, "output_gate_type", "other output gates") for name in QWEN3_5),
    *((name, {"mlp_only_layers": [1]}, "mlp_only_layers", "layers without a mixer") for name in QWEN3_5),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob", "weights that are not normalised"),
    ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step", "layers without experts"),
    ("lfm2", {"layer_types": ["mamba"] * 2}, "mamba", "other layer types"),
    ("lfm2", {"conv_bias": True}, "conv_bias", "convolution with bias"),
    *((name, {"num_experts_per_tok": 999}, "num_experts_per_tok", "more experts per token") for name in EXPERTS),
    *((name, {"num_experts": 4, "num_local_experts": 8}, "num_local_experts", "two counts") for name in EXPERTS),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers", "layers without experts"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step", "layers without experts"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise", "noise in the router"),
    ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise", "noise in the router"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func", "other routing"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias", "other routing"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type", "other norms"),
    ("minimax_m2", {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta", "other norms"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list", "linear attention"),
    ("minimax_m2", {"shared_intermediate_size": 48}, "shared_intermediate_size", "shared experts"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv", "clipped q, k and v"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention", "other layer types"),
    ("gpt_oss", {"experts_per_token": 2}, "experts_per_token: 2", "two counts of experts per token"),
    ("gpt_oss", {"initial_context_length": 8192}, "initial_context_length", "two original contexts"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention", "cross attention"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", "scaling by layer"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights", "unscaled attention"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings", "untied head"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "change", "named", "feature"), REFUSED)
def test_refused_by_name(
    model_type: str, change: dict[str, Any], named: str, feature: str, families_table: Callable[[str, str, Any], None]
) -> None:
    with pytest.raises(UserError) as raised:
        read_config(minimal(model_type, **change), WHERE)
    assert WHERE in raised.value.what
    assert named in raised.value.what
    families_table(ROWS[model_type], "refused", [feature])
    for row in ALSO.get(model_type, ()):
        families_table(row, "refused", [feature])


@pytest.mark.parametrize("model_type", ["gemma3n", "phimoe", "llama4", None, 7, ["llama"]])
def test_other_families_are_refused(model_type: Any) -> None:
    with pytest.raises(UserError) as raised:
        read_config(PLAIN | {"model_type": model_type}, WHERE)
    assert WHERE in raised.value.what
    assert repr(model_type) in raised.value.what
    assert "gemma3_text" in (raised.value.why or "")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [None, "32", True, 3.5])
def test_a_dimension_that_is_none(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=key):
        read_config(minimal("llama", **{key: value}), WHERE)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear"},
        {"type": "linear", "factor": "four"},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "long"},
        {"rope_type": "longrope", "short_factor": [1.0] * 4},
        [1, 2],
        "linear",
    ],
    ids=str,
)
def test_a_broken_scaling_is_the_users_error(scaling: Any) -> None:
    with pytest.raises(UserError) as raised:
        read_config(minimal("llama", rope_scaling=scaling), WHERE)
    assert WHERE in raised.value.what
