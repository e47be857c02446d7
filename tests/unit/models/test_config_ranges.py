"""Numbers of a config.json: whatever they are, the answer is a model that can be built or an error of the user's."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_configs import GEMMA2_2B, GEMMA3_1B, GEMMA4_12B, GEMMA4_E2B, GPT2

from forerun.config.schema import Model
from forerun.errors import UserError
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families.registry import FAMILIES, read_config
from forerun.models.families.settings import RANGES, ZERO_MEANS_ABSENT
from forerun.models.model_facts import model_for
from forerun.nn.rope import frequencies
from forerun.nn.spec import count

PLAIN = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "head_dim": 8,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.1}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
MSCALE = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
GRANITE = {"embedding_multiplier": 12, "attention_multiplier": 0.1, "residual_multiplier": 0.2, "logits_scaling": 8.0}
DENSE = {"layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ORIGINAL = {"original_max_position_embeddings": 64}
DELTA: dict[str, float] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"rope_scaling": LLAMA3 | ORIGINAL, "eos_token_id": [1, 2], "pad_token_id": -1},
    "qwen2": PLAIN | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": PLAIN | {"rope_scaling": YARN | ORIGINAL},
    "mistral": PLAIN | {"sliding_window": 16},
    "smollm3": PLAIN | {"no_rope_layer_interval": 2},
    "gemma2": GEMMA2_2B,
    "gemma3_text": GEMMA3_1B,
    "vaultgemma": GEMMA2_2B,
    "gemma4_text": GEMMA4_E2B
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma4_unified_text": GEMMA4_12B,
    "phi3": PLAIN | ORIGINAL | {"rope_scaling": LONG, "partial_rotary_factor": 1.0, "sliding_window": 16},
    "olmo2": PLAIN,
    "olmo3": PLAIN | {"rope_scaling": YARN | ORIGINAL, "sliding_window": 16},
    "exaone4": PLAIN | {"rope_scaling": LLAMA3 | ORIGINAL, "sliding_window": 16, "sliding_window_pattern": 2},
    "seed_oss": PLAIN,
    "cwm": PLAIN | {"rope_scaling": LLAMA3 | ORIGINAL, "sliding_window": 16},
    "ministral3": PLAIN | {"rope_scaling": MSCALE | ORIGINAL},
    "granite": PLAIN | GRANITE,
    "granitemoehybrid": PLAIN | GRANITE | DENSE,
    "glm": PLAIN | {"partial_rotary_factor": 0.5},
    "glm4": PLAIN | {"rope_scaling": YARN | ORIGINAL, "partial_rotary_factor": 0.5},
    "ernie4_5": PLAIN,
    "qwen3_5_text": PLAIN | DELTA,
    "qwen3_5_moe_text": {key: value for key, value in PLAIN.items() if key != "intermediate_size"}
    | DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "lfm2": PLAIN | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8},
    "qwen3_moe": PLAIN | EXPERTS,
    "mixtral": PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4},
    "olmoe": PLAIN | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "gpt_oss": PLAIN
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.7,
    }
    | {"rope_scaling": YARN | ORIGINAL | {"truncate": False}, "initial_context_length": 64, "sliding_window": 16},
    "gpt2": GPT2,
}


def config_of(family: str) -> dict[str, Any]:
    return CONFIGS[family] | {"model_type": family}


def places(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the path of every number, flag and list, those of RoPE's section included."""
    inner = [("rope_scaling", key) for key in content.get("rope_scaling") or {}]
    return [(key,) for key in content if key not in ("model_type", "architectures")] + inner


def changed(content: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return content | {path[0]: value}
    return content | {path[0]: content[path[0]] | {path[1]: value}}


def require_buildable(content: dict[str, Any]) -> None:
    """Fail unless the model has parameters and its positions turn by finite, positive angles."""
    _, config = read_config(content, "config.json")
    assert count(model_for(config).specs()) > 0
    if isinstance(config, DecoderConfig):
        for kind in config.layer_kinds:
            if kind.rope is not None:
                for long in (False, True):
                    turns = frequencies(kind.rope, long=long)
                    assert np.isfinite(turns).all()
                    assert (turns >= 0).all()


def test_every_family_has_a_sample() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_samples_are_accepted(family: str) -> None:
    require_buildable(config_of(family))


WITHOUT_EXPERTS = ("gemma4_text", "granitemoehybrid")  # 0 and empty values of the key mean no experts
MAY_BE_0 = ("max_window_layers", "num_kv_shared_layers", "hidden_size_per_layer_input")
BAD = [-1, 0, -(2**70), 10**9 * 10**9, 10**400, math.nan, math.inf, -math.inf, True, "12; rm", [2], {}, -0.5]


@pytest.mark.parametrize("family", CONFIGS)
def test_numbers_outside_their_range_are_errors(family: str) -> None:
    content = config_of(family)
    for path in places(content):
        if path[-1] not in RANGES:
            continue
        for value in BAD:
            if (path[-1] in MAY_BE_0 and value == 0) or (path[-1] == "partial_rotary_factor" and value is True):
                continue
            if path[-1] in ZERO_MEANS_ABSENT and value == 0:
                continue
            if path[-1] in ("num_experts", "num_local_experts") and not value and family in WITHOUT_EXPERTS:
                continue
            with pytest.raises(UserError):
                read_config(changed(content, path, value), "config.json")


numbers = st.one_of(
    st.integers(-3, 300),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([*BAD, None, False, 1e-320, 2**31, 2**63, 1e308]),
    st.lists(st.one_of(st.integers(), st.floats(), st.none()), max_size=5),
)


@given(st.data())
def test_any_numbers_give_a_model_or_an_error_of_the_user(data: st.DataObject) -> None:
    content = config_of(data.draw(st.sampled_from(sorted(CONFIGS))))
    for path in data.draw(st.lists(st.sampled_from(places(content)), min_size=1, max_size=3)):
        if isinstance(content.get(path[0]), dict) or len(path) == 1:
            content = changed(content, path, data.draw(numbers))
    with contextlib.suppress(UserError):
        require_buildable(content)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"layer_types": ["full_attention"] * 200_000},
        {"layer_types": 5},
        {"eos_token_id": "end"},
        {"eos_token_id": 10**9},
        {"bos_token_id": [1, "a"]},
        {"tie_word_embeddings": "no"},
        {"rope_scaling": LLAMA3 | ORIGINAL | {"low_freq_factor": 4.0}},
        {"rope_scaling": [1]},
        {"rope_parameters": "all"},
    ],
    ids=str,
)
def test_dimensions_that_do_not_fit_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        read_config(config_of("qwen3") | change, "config.json")


def test_factors_of_longrope_that_do_not_fit_the_heads_are_errors() -> None:
    short = {"rope_scaling": LONG | {"short_factor": [1.0] * 3}}
    with pytest.raises(UserError):
        read_config(config_of("phi3") | short, "config.json")


@pytest.mark.parametrize(
    "key",
    [
        {"layers": 10**9},
        {"embed": 10**9},
        {"heads": 10**9},
        {"vocab": 10**12},
        {"rope_theta": -1.0},
        {"rope_theta": 1.0},
        {"norm_eps": 0.0},
        {"rope_scaling": {"factor": -8.0}},
    ],
    ids=str,
)
def test_the_same_bounds_hold_for_the_keys_of_a_job(key: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="1 validation error"):
        Model.model_validate(key)
