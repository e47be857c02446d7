"""scripts/family-check: a family that passes, and one that only seems to be Llama."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from family_parity import ORIGINAL, VOCAB
from tiny_checkpoint import WINDOW, tiny_config
from wrappers_reference import checkpoint

from forerun.models.families.registry import FAMILIES, compare_keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "new-family.md"
CHECKS = {
    "config keys", "tensors", "logits", "packed against separate", "gradients", "cached against uncached",
    "greedy tokens", "export: changes",
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    loader = importlib.machinery.SourceFileLoader("family_check", str(ROOT / "scripts" / "family-check"))
    spec = importlib.util.spec_from_loader("family_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # its dataclasses look there
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)  # a file next to the script would be written
        loader.exec_module(module)
        yield module


def written(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write transformers' default config.json of a model type, which has the dimensions of a published model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = json.loads(CONFIG_MAPPING[model_type](**changes).to_json_string(use_diff=False))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def results(printed: str) -> dict[str, str]:
    """Return the result of each row of the printed table."""
    cells = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.count("|") == 4]
    return {row[0]: row[3] for row in cells if row[3] in ("pass", "FAIL")}


@pytest.mark.torch
def test_the_example_of_the_page_passes(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of section 3, on a config.json alone: the rows are those of the page, and every check passes."""
    _, section = PAGE.read_text().split("## 3. ")
    command, shown = re.findall(r"^\$ scripts/family-check (.*?)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    written(tmp_path / command, "vaultgemma")
    assert script.main([command]) == 0
    found = results(capsys.readouterr().out)
    assert set(found) == CHECKS
    assert set(found.values()) == {"pass"}
    assert results(shown) == found


@pytest.mark.torch
def test_ernie_is_not_llama(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama's reader understands every key, and its table names every tensor. Only the numbers are wrong."""
    folder = written(tmp_path / "ernie", "ernie4_5")
    assert script.main([str(folder), "--as", "llama"]) == 1
    printed = capsys.readouterr().out
    found = results(printed)
    assert {name for name, result in found.items() if result == "FAIL"} == {"logits", "gradients", "greedy tokens"}
    assert found["config keys"] == found["tensors"] == "pass"
    (logits,) = re.findall(r"^logits +\| ([^ ]+)", printed, re.MULTILINE)
    assert float(logits) > 1.0


@pytest.fixture
def invented_family(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register a model_type that exists in transformers during the test only, so that no release supports it."""
    from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config_class = type("InventedConfig", (MixtralConfig,), {"model_type": "invented_experts"})
    model_class = type("InventedForCausalLM", (MixtralForCausalLM,), {"config_class": config_class})
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    AutoConfig.register("invented_experts", config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    return "invented_experts"


@pytest.mark.torch
def test_all_unknown_keys_and_tensors_are_named(
    script: ModuleType, invented_family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "experts", invented_family, expert_echo=0.5)
    assert script.main([str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "E-MODEL-001" in printed
    assert "expert_echo" in printed
    assert script.main([str(folder), "--as", "mistral"]) == 1
    printed = capsys.readouterr().out
    assert results(printed) == {"config keys": "FAIL", "tensors": "FAIL"}
    for name in ("expert_echo", "num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"):
        assert f"unread: {name}" in printed
    assert re.search(r"model\.layers\.\{\}\.\S*gate", printed)
    assert "model.layers.{}.mlp.up_proj.weight" in printed


@pytest.mark.torch
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "gemma4", "gemma4_unified"])
def test_the_text_tensors_of_a_multimodal_folder_are_compared(script: ModuleType, name: str) -> None:
    folder = checkpoint(name)
    config = script.text_section(folder)
    assert script.keys_check(config, config["model_type"], set()).passed
    result = script.tensors_check(folder, config, config["model_type"], set())
    assert result.passed, result.details
    assert int(result.measured.split()[2]) > 20


@pytest.mark.torch
def test_the_tensors_of_a_text_folder_with_prefixes_are_compared(script: ModuleType, tmp_path: Path) -> None:
    """transformers saves the text part of Qwen3.5 with the names of the multimodal model."""
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_5")).save_pretrained(tmp_path)
    config = script.text_section(tmp_path)
    assert config["model_type"] == "qwen3_5_text"
    assert "model.language_model.norm.weight" in script.tensor_names(tmp_path)
    result = script.tensors_check(tmp_path, config, "qwen3_5_text", set())
    assert result.passed, result.details


PUBLISHED = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
    "eos_token_id": [1, 106],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}


def test_tiny_dimensions_keep_the_structure() -> None:
    tiny = tiny_config(PUBLISHED)
    assert tiny["num_hidden_layers"] == 7  # one period and one layer more
    assert (tiny["vocab_size"], tiny["sliding_window"], tiny["num_key_value_heads"]) == (VOCAB, WINDOW, 1)
    assert tiny["head_dim"] * tiny["num_attention_heads"] != tiny["hidden_size"]
    assert tiny["query_pre_attn_scalar"] == tiny["head_dim"]
    assert tiny["rms_norm_eps"] == PUBLISHED["rms_norm_eps"]
    assert "quantization_config" not in tiny
    assert compare_keys(tiny, "gemma3_text").count == 0


def test_tiny_lists_and_rope_sections() -> None:
    types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [float(n) for n in range(48)],
        "original_max_position_embeddings": 4096,
        "mrope_section": [11, 11, 10],
    }
    sizes = {"num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32}
    tiny = tiny_config(sizes | {"layer_types": types, "rope_parameters": rope})
    assert tiny["layer_types"] == types[:5]
    scaled = tiny["rope_parameters"]
    assert scaled["long_factor"] == [0.0, 12.0, 24.0, 36.0]
    assert scaled["original_max_position_embeddings"] == ORIGINAL
    assert sum(scaled["mrope_section"]) == 4


def test_the_last_tiny_layer_of_gemma_4_is_global() -> None:
    """Every fifth layer of E2B is global, so the last one of six is local in the list. transformers changes it."""
    types = [*["sliding_attention"] * 4, "full_attention"] * 7
    changes = {str(n): {"head_dim": 512} for n, one in enumerate(types) if one == "full_attention"}
    sizes = {"num_hidden_layers": 35, "hidden_size": 1536, "num_attention_heads": 8, "num_kv_shared_layers": 20}
    tiny = tiny_config(sizes | {"layer_types": types, "per_layer_config": changes})
    assert (tiny["num_hidden_layers"], tiny["num_kv_shared_layers"]) == (6, 3)
    assert tiny["per_layer_config"] == {"4": {"head_dim": 32}, "5": {"head_dim": 32}}


def test_the_script_reads_the_registry(script: ModuleType) -> None:
    with pytest.raises(SystemExit):
        script.main(["folder", "--as", "no_such_family"])
    assert script.FAMILIES is FAMILIES
