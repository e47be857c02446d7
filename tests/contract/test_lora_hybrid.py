"""Adapters of models whose layers differ: the modules that they are on, and PEFT's logits with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from lora_reference import job_in, torch_logits, torch_model
from safetensors.numpy import load_file, save_file

from forerun.config.schema import Model
from forerun.hardware.devices import choose
from forerun.hub.documents import read_json
from forerun.models.families.registry import FAMILIES
from forerun.models.keys import path_text
from forerun.models.model_facts import ModelFacts
from forerun.nn.compute import Compute
from forerun.nn.weights.dense import map_weights
from forerun.nn.weights.lowrank import LowRank
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.run_devices import program_on
from forerun.trained_model.base_weights import read_file_weights
from forerun.trained_model.peft_folder import read_adapter, write_adapter

# PEFT looks for the keys of rank_pattern only among modules, and warns about those of parameters, which it applies.
UNMATCHED = "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning", UNMATCHED)]
IDS = np.frombuffer(b"5 pears and 2 apples", np.uint8)
TINY = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
LOCAL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# The names of transformers' classes, and settings with layers of every kind.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {"num_hidden_layers": 3, "layer_types": LINEAR, "head_dim": 16, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {"intermediate_size": None, "num_hidden_layers": 3, "layer_types": LINEAR, "head_dim": 16, "num_experts": 4,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"num_hidden_layers": 4, "layer_types": LOCAL, "head_dim": 8, "global_head_dim": 16, "sliding_window": 6,
         "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260},
    ),
}  # fmt: skip
KNOWN = [name for name in MODELS if name in FAMILIES]


def checkpoint(folder: Path, name: str) -> Any:
    """Write a tiny checkpoint of transformers, and return the torch model."""
    import torch
    import transformers

    config, model, settings = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**TINY, **settings}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return torch_model(folder)


@pytest.mark.parametrize("name", KNOWN)
def test_all_linear_is_every_linear_layer_of_transformers_and_peft_computes_the_same(name: str, tmp_path: Path) -> None:
    import peft
    import torch

    theirs = checkpoint(tmp_path / "base", name)
    job = job_in(tmp_path, "{rank: 3, base: float32}")
    program = program_on(ResolvedJob(job), choose("cpu", 1), 100)
    key, family = jax.random.key(5), ModelFacts(job.model).family
    assert family is not None

    def moved(weight: Any) -> Any:
        if not isinstance(weight, LowRank):
            return weight
        return replace(weight, up=0.1 * jax.random.normal(key, weight.up.shape))

    params = program.initial_state(0, read_file_weights(ResolvedJob(job), program)).params
    params = map_weights(moved, params)
    (tmp_path / "peft").mkdir()
    write_adapter(tmp_path / "peft", params, job, family, program.model, "base")

    linear = [one for one, module in theirs.named_modules() if isinstance(module, torch.nn.Linear) and "layers." in one]
    wanted = {one for one in linear if "per_layer" not in one and not one.endswith("shared_expert_gate")}
    stacked = [one for one, _ in theirs.named_modules() if one.endswith(".experts")]  # two parameters of each
    wanted |= {one + end for one in stacked for end in ("", ".base_layer")}
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft")
    start, end = "base_model.model.", ".lora_A.default"
    found = {one.removeprefix(start).removesuffix(end) for one, _ in adapted.named_modules() if one.endswith(end)}
    assert found == wanted
    assert read_json(tmp_path / "peft" / "adapter_config.json")["target_modules"]

    ids = IDS[None].astype(np.int32)
    where = np.arange(ids.shape[1], dtype=np.int32)[None]
    ours = jax.jit(lambda p: program.model.apply(p, ids, np.ones_like(ids), where, Compute()).logits()[0])(params)
    np.testing.assert_allclose(np.asarray(ours), torch_logits(adapted, IDS), atol=1e-4)

    back = read_adapter(tmp_path / "peft", ResolvedJob(job), program.state.params)
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, LowRank))
    adapters = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    for path, halves in back.items():
        for half, array in halves.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(getattr(adapters[path], half)))


def test_targets_of_experts_do_not_depend_on_the_layout_of_the_files() -> None:
    """The named size has the tables of the published files: all experts of a layer in two tensors."""
    names = ModelFacts(Model(name="qwen3.5-35b-a3b")).module_names
    fused = FAMILIES["qwen3_5_moe_text"]
    separate = fused.stored_as([f"model.layers.0.mlp.experts.0.{one}_proj.weight" for one in ("gate", "up", "down")])
    assert separate.table == fused.other_table
    assert separate.modules == fused.modules
    assert {path for path, name in names.items() if name.endswith(".gate_proj")} == {
        "blocks.gate",
        "blocks.expert_gate",
    }


def test_quantized_experts_of_both_layouts_are_the_same(tmp_path: Path) -> None:
    """Files with all experts of a layer in two tensors, as published, and files with one tensor per expert."""
    codes = []
    for fuses in (False, True):
        folder = tmp_path / f"fused {fuses}"
        (folder / "base").mkdir(parents=True)
        theirs = checkpoint(folder / "base", "qwen3_5_moe_text")
        if fuses:
            tensors = load_file(folder / "base" / "model.safetensors")
            stacked = {name: one.numpy() for name, one in theirs.state_dict().items() if ".experts." in name}
            separate = {name for name in tensors if ".experts." in name}
            assert not separate & set(stacked)
            left = {name: one for name, one in tensors.items() if name not in separate}
            save_file(left | stacked, folder / "base" / "model.safetensors", {"format": "pt"})
        job = job_in(folder, "{rank: 3, base: nf4, block: 8}")
        resolved = ResolvedJob(job)
        read = read_file_weights(resolved, program_on(resolved, choose("cpu", 1), 100))
        flat = jax.tree_util.tree_leaves_with_path(read)
        codes.append({path_text(path): np.asarray(leaf) for path, leaf in flat})
    separate_codes, fused_codes = codes
    assert any("expert_up.codes" in name for name in fused_codes)
    assert separate_codes.keys() == fused_codes.keys()
    for name, value in fused_codes.items():
        np.testing.assert_array_equal(separate_codes[name], value, err_msg=name)
