"""Unknown families: the first unsupported component and the nearest family. The oracle: published facts about each."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.errors import UserError
from forerun.models.families.registry import FAMILIES, compare_keys, read_config
from forerun.models.families.unknown import COMPONENTS, Component, first_unsupported, nearest, unknown_family

# A fixed choice, so that the expectations do not change with every family that is added.
SOME = {
    name: FAMILIES[name]
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2")
}
PLAIN = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DELTA = {"linear_num_value_heads": 8, "layer_types": ["linear_attention"]}

# transformers' model type -> a word of the component, and the nearest of SOME
PUBLISHED = {
    "mixtral": ("num_local_experts", "mistral"),
    "qwen3_moe": ("expert", "qwen3"),
    "gpt_oss": ("expert", "qwen3"),
    "deepseek_v3": ("kv_lora_rank", "llama"),
    "qwen3_next": ("delta", "qwen3"),
    "falcon_h1": ("Mamba", "llama"),
    "gemma3n": ("AltUp", "gemma3_text"),
    "recurrent_gemma": ("lru_width", None),
    "minimax": ("linear attention", None),
    "mllama": ("cross_attention_layers", None),
    "t5": ("is_encoder_decoder", None),
    "whisper": ("is_encoder_decoder", None),
    "bert": ("both directions", None),
    "cohere2": ("parallel", None),
    "hy_v4": ("hc_mult", None),
    "phimoe": ("num_local_experts", "phi3"),
    "arcee": ("relu2", "llama"),
    "ernie4_5": ("interleaved RoPE", "llama"),
    "voxtral": ("text_config", "llama"),
    "qwen3_vl": ("text_config", "qwen3"),
}


def published(model_type: str) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return content


@pytest.mark.torch
@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_families(model_type: str) -> None:
    component, family = PUBLISHED[model_type]
    error = unknown_family(published(model_type), "x/config.json", SOME)
    assert_error(error, "E-MODEL-001", what=repr(model_type), why=component, fix="docs/how-to/new-family.md")
    near, _ = nearest(published(model_type), SOME)
    assert f"nearest supported family is {near.model_type}" in (error.why or "")
    assert family in (None, near.model_type)


@pytest.mark.torch
def test_the_table_names_model_types_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert {name for one in COMPONENTS for name in one.supported_by} - set(CONFIG_MAPPING) == set()


def test_every_component_has_a_different_name() -> None:
    assert len({one.name for one in COMPONENTS}) == len(COMPONENTS)


def test_a_component_is_supported_with_the_first_family_that_has_it() -> None:
    config = PLAIN | DELTA | {"model_type": "qwen9", "kv_lora_rank": 16}
    assert "linear_num_value_heads" in (first_unsupported(config, SOME) or "")
    assert "kv_lora_rank" in (first_unsupported(config, {*SOME, "qwen3_5"}) or "")
    assert not Component("nothing", lambda config: None).is_supported(FAMILIES)


def test_dense_granite_has_no_mamba_layers() -> None:
    config = PLAIN | {"model_type": "granitemoehybrid", "mamba_d_state": 128, "num_local_experts": 0}
    assert "Mamba" in (first_unsupported(config | {"layer_types": ["mamba", "attention"]}, SOME) or "")
    assert first_unsupported(config | {"layer_types": ["attention", "attention"]}, SOME) is None


def test_equal_keys_are_not_enough() -> None:
    """A config.json without any unknown key, of an unknown model type, is an error."""
    with pytest.raises(UserError) as raised:
        read_config(PLAIN | {"model_type": "llama_of_another_world"}, "x/config.json")
    assert_error(raised.value, "E-MODEL-001", what="llama_of_another_world", why="nearest supported family is llama")


def test_the_text_model_of_a_wrapper_decides() -> None:
    """Keys of its vision tower do not count; the text model's own family is the nearest."""
    tower = {"hidden_size": 8, "num_experts": 4, "model_type": "siglip"}
    inner = PLAIN | {"model_type": "qwen3", "head_dim": 8}
    config = {"model_type": "sees", "vision_config": tower, "text_config": inner}
    assert "text_config of 'qwen3'" in (first_unsupported(config, SOME) or "")
    assert nearest(config, SOME)[0].model_type == "qwen3"
    config["text_config"] = inner | {"num_experts": 4}
    assert "num_experts: 4" in (first_unsupported(config, SOME) or "")


@pytest.mark.parametrize(("method", "named"), [("mxfp4", "MXFP4"), ("gptq", "gptq"), ("fp8", "FP8")])
def test_quantized_weights(method: str, named: str) -> None:
    config = PLAIN | {"model_type": "new", "quantization_config": {"quant_method": method}}
    assert named in (first_unsupported(config, SOME) or "")


def test_all_keys_that_a_reader_does_not_understand() -> None:
    config = PLAIN | {"num_experts": 8, "rope_interleave": True, "hidden_act": "relu2", "use_cache": True, "off": False}
    del config["num_hidden_layers"]
    left = compare_keys(config, "llama")
    assert left.unread == ("num_experts", "rope_interleave")
    assert left.refused == ("hidden_act: 'relu2'",)
    assert left.missing == ("num_hidden_layers",)
    assert left.fault is None
    assert left.count == 4
    assert compare_keys(PLAIN, "llama").count == 0


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "odd", "text_config": 3, "layer_types": 7, "rope_parameters": [1], "quantization_config": "x"},
        {"model_type": "odd", "text_config": {"text_config": {}}, "architectures": "LlamaForCausalLM"},
        {"model_type": "odd", "hidden_size": "wide", "num_attention_heads": 0, "rope_scaling": {"type": [1]}},
        {"model_type": ["odd"]},
        {},
    ],
    ids=str,
)
def test_a_strange_file_is_the_same_error(config: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        read_config(config, "x/config.json")
    assert raised.value.code == "E-MODEL-001"


def test_jax_is_not_imported() -> None:
    code = """
import sys
from forerun.models.families.registry import FAMILIES
from forerun.models.families.unknown import unknown_family
unknown_family({"model_type": "mixtral", "num_local_experts": 8}, "config.json", FAMILIES)
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
