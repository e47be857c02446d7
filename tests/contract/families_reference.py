"""Tiny random checkpoints written by transformers, one per kind of every family, and the same weights in forerun.

torch and transformers are imported inside functions only. Weights go through the family's own table of tensors.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from family_parity import ORIGINAL, VOCAB, Pair, params_of

from forerun.hub.documents import read_json
from forerun.hub.safetensors import open_weights
from forerun.models.families.registry import read_config
from forerun.models.model_facts import model_for

WINDOW = 6

DIMENSIONS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1000.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 1000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "short_factor": [1.0 + 0.1 * n for n in range(pairs)],
        "long_factor": [2.0 + 0.7 * n for n in range(pairs)],
        "original_max_position_embeddings": ORIGINAL,
    }


@dataclass(frozen=True)
class Variant:
    """One kind of a family: the row of the docs' table, transformers' class, and what differs from the defaults."""

    row: str
    kind: str  # as in LlamaConfig and LlamaForCausalLM
    changes: Mapping[str, Any] = field(default_factory=dict)
    dimensions: Mapping[str, Any] = field(default_factory=lambda: DIMENSIONS)

    @property
    def scaling(self) -> str:
        """Of RoPE, in words."""
        rope = self.changes.get("rope_parameters", {})
        kind = rope.get("full_attention", rope).get("rope_type", "default")
        return "none" if kind == "default" else str(kind)


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}
GEMMA3_ROPE = {
    "full_attention": LINEAR,
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 6,
    "layer_types": [LOCAL, LOCAL, GLOBAL] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 100.0},
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    },
}
GEMMA4_LARGE = GEMMA4 | {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
GEMMA4_SMALL = GEMMA4 | {
    "hidden_size_per_layer_input": 32,  # with a few, all gates of a token may be 0, and a norm amplifies the rest
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
}
GEMMA4_EXPERTS = GEMMA4_LARGE | {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
MINIMAX_M2 = {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 4, "max_window_layers": 2}
PHI = {"num_attention_heads": 2, "original_max_position_embeddings": ORIGINAL}
SLIDING_AND_FULL = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
OLMO3_ROPE = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
MINISTRAL3_ROPE = YARN | {
    "original_max_position_embeddings": 16,  # documents of 40 tokens have three temperatures
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "llama_4_scaling_beta": 0.5,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.5,
}
GRANITE4 = {
    "layer_types": ["full_attention"] * 2,
    "shared_intermediate_size": 56,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
    "position_embedding_type": "rope",
    "tie_word_embeddings": True,
}
QWEN3_5 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN3_5_MOE = QWEN3_5 | {
    "intermediate_size": None,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "rms_norm_eps": 1e-4,
}
LFM2 = {"block_multiple_of": 8, "layer_types": ["conv", "full_attention"], "rope_parameters": LINEAR}
QWEN3_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS = {  # a low limit, so that some values are clamped
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": WINDOW,
    "head_dim": 16,
    "swiglu_limit": 0.6,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VARIANTS: dict[str, Variant] = {
    "llama2": Variant("Llama 2, 3.x", "Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": Variant("Llama 2, 3.x", "Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": Variant("Llama 2, 3.x", "Llama", {"rope_parameters": LINEAR, "head_dim": 16}),
    "llama-yarn": Variant("Llama 2, 3.x", "Llama", {"rope_parameters": YARN}),
    "llama-biases": Variant("Llama 2, 3.x", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": Variant(
        "SmolLM2",
        "Llama",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "smollm3": Variant("SmolLM3", "SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-tail": Variant(
        "SmolLM3", "SmolLM3", {"num_hidden_layers": 6, "tie_word_embeddings": False, "rope_parameters": YARN}
    ),
    "qwen2": Variant("Qwen2, 2.5", "Qwen2"),
    "qwen2-tied": Variant("Qwen2, 2.5", "Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": Variant("Qwen2, 2.5", "Qwen2", UPPER_WINDOWS),
    "qwen3": Variant("Qwen3", "Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": Variant("Qwen3", "Qwen3", {"head_dim": 16, "rope_parameters": YARN, "attention_bias": True}),
    "mistral": Variant("Mistral", "Mistral", {"sliding_window": WINDOW}),
    "mistral-full": Variant("Mistral", "Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "gemma2": Variant(
        "Gemma 2",
        "Gemma2",
        GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2-tail": Variant(
        "Gemma 2",
        "Gemma2",
        GEMMA | {"num_hidden_layers": 3, "tie_word_embeddings": False, "attn_logit_softcapping": None},
    ),
    "gemma3": Variant("Gemma 3 (text)", "Gemma3", GEMMA | {"num_hidden_layers": 6}),
    "gemma3-tail": Variant(
        "Gemma 3 (text)", "Gemma3", GEMMA | {"num_hidden_layers": 8, "rope_parameters": GEMMA3_ROPE}
    ),
    "vaultgemma": Variant("VaultGemma", "VaultGemma", GEMMA | {"num_hidden_layers": 3}),
    "gemma4-12b": Variant("Gemma 4 12B (text)", "Gemma4Unified", GEMMA4_LARGE),
    "gemma4-12b-tail": Variant(
        "Gemma 4 12B (text)",
        "Gemma4Unified",
        GEMMA4_LARGE | {"num_hidden_layers": 5, "layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL]},
    ),
    "gemma4-31b": Variant("Gemma 4 31B (text)", "Gemma4", GEMMA4_LARGE | {"attention_bias": True}),
    "gemma4-26b": Variant("Gemma 4 26B-A4B (text)", "Gemma4", GEMMA4_EXPERTS),
    "gemma4-e2b": Variant(
        "Gemma 4 E2B, E4B (text)", "Gemma4", GEMMA4_SMALL | {"use_double_wide_mlp": True, "num_key_value_heads": 1}
    ),
    "gemma4-e4b-tails": Variant(
        "Gemma 4 E2B, E4B (text)",
        "Gemma4",
        GEMMA4_SMALL
        | {"num_hidden_layers": 9, "layer_types": [*[LOCAL, GLOBAL] * 2, *[LOCAL, LOCAL, GLOBAL], LOCAL, GLOBAL]},
    ),
    "phi3": Variant("Phi-3, Phi-4-mini", "Phi3", PHI | {"sliding_window": WINDOW}),
    "phi3-longrope": Variant("Phi-3, Phi-4-mini", "Phi3", PHI | {"rope_parameters": longrope(8)}),
    "phi4-mini": Variant(
        "Phi-3, Phi-4-mini",
        "Phi3",
        PHI | {"rope_parameters": longrope(6) | {"partial_rotary_factor": 0.75}, "tie_word_embeddings": True},
    ),
    "olmo2": Variant("OLMo 2", "Olmo2"),
    "olmo2-yarn": Variant(
        "OLMo 2", "Olmo2", {"rope_parameters": YARN, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "olmo3": Variant("OLMo 3", "Olmo3", SLIDING_AND_FULL | {"rope_parameters": OLMO3_ROPE, "attention_bias": True}),
    "exaone4": Variant(
        "EXAONE 4",
        "Exaone4",
        {"sliding_window": None, "rope_parameters": LLAMA3, "layer_types": ["full_attention"] * 2},
    ),
    "exaone4-window": Variant("EXAONE 4", "Exaone4", SLIDING_AND_FULL | {"head_dim": 16, "tie_word_embeddings": True}),
    "seed-oss": Variant("Seed-OSS", "SeedOss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "cwm": Variant("CWM", "Cwm", SLIDING_AND_FULL | {"head_dim": 8, "rope_parameters": LLAMA3}),
    "ministral3": Variant(
        "Ministral 3", "Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE, "tie_word_embeddings": True}
    ),
    "granite": Variant("Granite 3, 4.1", "Granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granite4": Variant("Granite 4.0 without Mamba", "GraniteMoeHybrid", GRANITE | GRANITE4),
    "glm": Variant("GLM-4", "Glm", {"head_dim": 16, "tie_word_embeddings": True}),
    "glm4": Variant("GLM-4", "Glm4", {"head_dim": 16, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}}),
    "ernie": Variant("ERNIE 4.5", "Ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": True}),
    # The norm behind the delta rule divides by the size of its output, which is near zero for some tokens. With the
    # default epsilon, 1e-6, the rounding of float32 there gave logits that were 1.8e-4 apart. In another program they
    # were 6.0e-5 apart, and both were compared with transformers' model computed in float64 throughout: the largest
    # difference was 2.0e-4 for forerun and 2.6e-4 for transformers (root mean square: 5.7e-6 and 7.1e-6).
    "qwen3.5": Variant("Qwen3.5, 3.6, 3.8 (dense)", "Qwen3_5", QWEN3_5 | {"rms_norm_eps": 1e-4}),
    "qwen3.5-tail": Variant(
        "Qwen3.5, 3.6, 3.8 (dense)",
        "Qwen3_5",
        QWEN3_5
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": Variant("Qwen3.5, 3.6 (experts)", "Qwen3_5Moe", QWEN3_5_MOE),
    "lfm2": Variant("LFM2, LFM2.5", "Lfm2", LFM2),
    "lfm2-tail": Variant(
        "LFM2, LFM2.5",
        "Lfm2",
        LFM2
        | {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "qwen3-moe": Variant("Qwen3-MoE", "Qwen3Moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3-moe-window": Variant(
        "Qwen3-MoE", "Qwen3Moe", QWEN3_MOE | UPPER_WINDOWS | {"attention_bias": True, "tie_word_embeddings": True}
    ),
    "mixtral": Variant(
        "Mixtral",
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": WINDOW, "head_dim": 16},
    ),
    "olmoe": Variant("OLMoE", "Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "rope_parameters": YARN}),
    "minimax-m2": Variant("MiniMax-M2", "MiniMaxM2", MINIMAX_M2),
    "gpt-oss-full": Variant(
        "gpt-oss", "GptOss", GPT_OSS | {"layer_types": [GLOBAL] * 2, "rope_parameters": LINEAR, "attention_bias": False}
    ),
    "gpt-oss": Variant("gpt-oss", "GptOss", GPT_OSS | {"rope_parameters": YARN | {"truncate": False}}),
    "gpt2": Variant("GPT-2", "GPT2", {}, GPT2),
    "gpt2-wide": Variant("GPT-2", "GPT2", {"n_inner": 80, "layer_norm_epsilon": 1e-6}, GPT2),
}
# transformers has a configuration of the text part of these.
TEXT_PARTS = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
FAMILIES: dict[str, list[str]] = {}  # the variants of each row
for _name, _variant in VARIANTS.items():
    FAMILIES.setdefault(_variant.row, []).append(_name)
FAMILY_EXAMPLES = {row: names[-1] for row, names in FAMILIES.items()}
# The logits of all variants are compared. Each other requirement is tested with one variant of each family: the number
# is its place in the family's list, counted in a circle, so that a family's requirements take turns with its variants.
TURNS = {"gradients": 0, "cache": 1, "packing": 2, "round trip": 3, "devices": -1, "greedy": -1}


def chosen_variants(requirement: str) -> list[str]:
    """Return the variant of each family with which a requirement is tested."""
    return [names[TURNS[requirement] % len(names)] for names in FAMILIES.values()]


@cache
def pair(name: str) -> Pair:
    reference = reference_of(VARIANTS[name])
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    atexit.register(shutil.rmtree, folder)
    reference.save_pretrained(folder)
    with open_weights(folder) as weights:
        family, config = read_config(read_json(folder / "config.json"), "config.json", list(weights))
        model = model_for(config)
        found = params_of({key: np.array(weights.view(key)) for key in weights}, family, model)
    return Pair(folder, reference, family, model, found)


def config_for(variant: Variant) -> Any:
    import transformers

    kind = f"{variant.kind}Text" if variant.kind in TEXT_PARTS else variant.kind
    given = {**variant.dimensions, **variant.changes}
    return getattr(transformers, f"{kind}Config")(**given, attn_implementation="eager")


def reference_of(variant: Variant) -> Any:
    """No norm and no scalar is 1 and no bias is 0, so that none can be left out unseen."""
    import torch
    import transformers

    kind = "GPT2LMHeadModel" if variant.kind == "GPT2" else f"{variant.kind}ForCausalLM"
    reference = getattr(transformers, kind)(config_for(variant)).eval()
    around_one = variant.kind not in ("Gemma2", "Gemma3", "VaultGemma", "Qwen3_5", "Qwen3_5Moe")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            is_scale = (("norm" in name or "ln_" in name) and name.endswith("weight")) or name.endswith("scale")
            mean = 1.0 if is_scale and (around_one or "linear_attn" in name) else 0.0
            if variant.kind.startswith("Gemma4") and "q_norm" in name:
                mean = 0.3  # only this norm scales the scores; with 1, attention would amplify rounding errors
            weight.normal_(mean, 0.2, generator=generator)
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.4, generator=generator)
                buffer.copy_(buffer.bfloat16())  # as in published files
    return reference
