"""The lower bounds of a search against the specs, the optimizer's state and the FLOPs of the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from forerun.config.schema import Job, Remat
from forerun.hardware.mesh import MeshShape
from forerun.hardware.slices import slice_named
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families.registry import FAMILIES
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.models.model_facts import config_of, model_of
from forerun.models.parameter_axes import layer_matrix_count
from forerun.models.sizes import SIZES
from forerun.nn.spec import count, is_spec
from forerun.planner.search.lower_bound import (
    NETWORK_SHARE,
    NVLINK_SHARE,
    PCIE_SHARE,
    LinkSpeeds,
    decoder_footprint,
    footprint,
)
from forerun.program.build import make_mesh
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

PLAIN = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,  # no multiple of a period of Gemma or SmolLM3
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
COUNTERS_BYTES = 64  # of the optimizer
WINDOW = {"sliding_window": 5}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DENSE_GRANITE = {"layer_types": ["attention"] * 7, "num_local_experts": 0, "shared_intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name} | (GPT2 if name == "gpt2" else PLAIN) for name in FAMILIES},
    "granitemoehybrid": {"model_type": "granitemoehybrid", **PLAIN, **DENSE_GRANITE},
    "gemma4_text": {"model_type": "gemma4_text", **PLAIN, "vocab_size_per_layer_input": 96},
    "gemma4-experts": {
        "model_type": "gemma4_text",
        **PLAIN,
        "hidden_size_per_layer_input": None,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **PLAIN, "shared_expert_intermediate_size": 40},
    **{
        f"{name}-window": {"model_type": name, **PLAIN, **WINDOW}
        for name in ("gemma2", "gemma3_text", "mistral", "phi3")
    },
    "llama-biases": {"model_type": "llama", **PLAIN, "attention_bias": True, "mlp_bias": True},
    "olmo2-biases": {"model_type": "olmo2", **PLAIN, "attention_bias": True, "tie_word_embeddings": True},
    "qwen2-untied": {"model_type": "qwen2", **PLAIN, "tie_word_embeddings": False},
    "gemma2-untied": {"model_type": "gemma2", **PLAIN, "tie_word_embeddings": False},
}
# Norms and biases of one layer with a width of 32, 4 x 8 queries, 2 x 8 keys and values, and an MLP of 48.
NORMS_AND_BIASES = {
    "llama": 2 * 32,
    "mistral": 2 * 32,
    "phi3": 2 * 32,
    "smollm3": 2 * 32,
    "qwen2": 2 * 32 + (32 + 16 + 16),
    "qwen2-untied": 2 * 32 + (32 + 16 + 16),
    "qwen3": 2 * 32 + 2 * 8,
    "gemma2": 4 * 32,
    "gemma2-untied": 4 * 32,
    "gemma3_text": 4 * 32 + 2 * 8,
    "vaultgemma": 2 * 32,
    "olmo2": 2 * 32 + (32 + 16),
    "olmo3": 2 * 32 + (32 + 16),
    "exaone4": 2 * 32 + 2 * 8,
    "seed_oss": 2 * 32 + (32 + 16 + 16),
    "cwm": 2 * 32,
    "ministral3": 2 * 32,
    "granite": 2 * 32,
    "granitemoehybrid": 2 * 32,
    "glm": 2 * 32 + (32 + 16 + 16),
    "glm4": 4 * 32 + (32 + 16 + 16),
    "ernie4_5": 2 * 32,
    "olmo2-biases": 2 * 32 + (32 + 16) + (32 + 16 + 16 + 32),
    "llama-biases": 2 * 32 + (32 + 16 + 16 + 32) + (48 + 48 + 32),
}
METHODS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "ema": {"optimizer": {"ema": 0.99}},
    "bfloat16": {"precision": {"params": "bfloat16"}},
    "qat": {"qat": {"group": 8}},
    "qat, learned scales": {"qat": {"group": 8, "scales": "learned"}},
    "lora": {"lora": {}},
    "qat and lora": {"qat": {"group": 8}, "lora": {}},
    "dpo": {"preferences": "dpo"},
    "dpo, a copy": {"preferences": {"reference": "beside"}},
}


def job(model: Any, **values: Any) -> Job:
    return Job.model_validate(
        {"model": model, "data": "nothing", "batch": 4, "sequence": 16, "steps": 10, "attention": "xla", **values}
    )


def folder_of(config: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_named_sizes_are_those_of_the_specs(name: str) -> None:
    wanted = job(name)
    assert footprint(ResolvedJob(wanted)).parameters == count(model_of(wanted.model).specs())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_flops_of_all_families_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    wanted = job(folder_of(CONFIGS[name], tmp_path))
    model, sizes = model_of(wanted.model), footprint(ResolvedJob(wanted))
    assert sizes.parameters == count(model.specs())
    assert sizes.flops == pytest.approx(model.flops_per_token(16) * 4 * 16, rel=1e-9)


@pytest.mark.parametrize("name", NORMS_AND_BIASES)
def test_parameters_are_those_counted_by_hand(name: str, tmp_path: Path) -> None:
    """The specs are made from the same axes as the count, so they alone would not show a missing norm."""
    wanted = job(folder_of(CONFIGS[name], tmp_path))
    matrices = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    tables = 1 if config_of(wanted.model).tied else 2
    assert footprint(ResolvedJob(wanted)).parameters == 7 * (matrices + NORMS_AND_BIASES[name]) + tables * 96 * 32 + 32


NEAR, FAR = LayerShape("sliding", mlp=20), LayerShape("full", heads=2, kv_heads=1, head_dim=12, key_is_value=True)
HYBRID = DecoderConfig(
    9, 32, 4, 2, 8, 48, 96, qk_norm=True, kinds=(LayerKind(5, None, NEAR), LayerKind(5, None, NEAR),
    LayerKind(None, None, FAR)), last_layers=2, last_kinds=(LayerKind(None, None, replace(FAR, shares_keys=True)),)
)  # fmt: skip


def test_layers_of_different_shapes_are_counted_one_by_one() -> None:
    """Seven layers repeat two local ones and a global one, and two more share the keys of a global one."""
    model, sizes = Decoder(HYBRID), decoder_footprint(ResolvedJob(job("llama3.2-1b")), HYBRID)
    assert sizes.parameters == count(model.specs())
    assert sizes.flops == pytest.approx(model.flops_per_token(16) * 4 * 16, rel=1e-9)
    local = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 20 + 2 * 32 + 2 * 8
    whole = 2 * 32 * 24 + 32 * 12 + 3 * 32 * 48 + 2 * 32 + 2 * 12
    shared = 2 * 32 * 24 + 3 * 32 * 48 + 2 * 32 + 12
    assert sizes.parameters == 5 * local + 2 * whole + 2 * shared + 96 * 32 + 32
    assert sizes.attention_flops == pytest.approx(4 * 16 * 4 * (5 * 32 * 5 * (1 - 5 / 32) + 4 * 24 * 8))
    assert sizes.widths["query"] == 5 * 32 + 4 * 24
    assert sizes.widths["key"] == 5 * 16 + 2 * 12
    assert sizes.widths["mlp_up"] == 5 * 20 + 4 * 48
    assert sizes.widths["layer_in"] == sizes.widths["full"] == 9 * 32


def test_a_convolution_counts_its_matrices_only() -> None:
    other = LayerKind(None, None, LayerShape("short", mixer="convolution", width=3))
    mixed = replace(HYBRID, layers=2, kinds=(other, LayerKind(None, None, FAR)), last_layers=0, last_kinds=())
    alone = replace(mixed, layers=1, kinds=(mixed.kinds[1],))
    both, one = (decoder_footprint(ResolvedJob(job("llama3.2-1b")), config) for config in (mixed, alone))
    assert both.attention_flops == one.attention_flops
    assert both.flops - one.flops == 4 * 16 * 6 * layer_matrix_count(mixed, other.shape)
    assert both.widths["query"] == one.widths["query"]


def test_every_decoder_family_is_counted_by_hand() -> None:
    """Layers of these differ, or have experts. tests/unit/models compares the counts of their published sizes."""
    other_layers = {"gemma4_text", "gemma4_unified_text", "qwen3_5_text", "lfm2"}
    other_layers |= {"qwen3_moe", "mixtral", "olmoe", "minimax_m2", "gpt_oss", "qwen3_5_moe_text"}
    assert {*FAMILIES} - {"gpt2"} - other_layers <= {*NORMS_AND_BIASES}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["gemma2", "olmo2-biases", "qwen2", "gemma4_unified_text"])
def test_no_state_is_smaller_than_its_bound(name: str, method: str, tmp_path: Path) -> None:
    """The oracle is the state that a Program would hold: weights, moments and an average, each array once."""
    from forerun.program.build import build

    wanted = job(folder_of(CONFIGS[name], tmp_path), **METHODS[method])
    one = MeshShape(1, 1, 1)
    program = build(ResolvedJob(wanted), make_mesh(one, jax.devices()[:1]), derive(wanted, one, 100))
    state = (program.state.params, program.state.optimizer, program.state.average)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state, is_leaf=is_spec))
    bound = footprint(ResolvedJob(wanted)).lower_bound_bytes(one)
    assert 0 <= held - bound <= COUNTERS_BYTES
    assert footprint(ResolvedJob(wanted)).lower_bound_bytes(MeshShape(2, 4, 2)) == bound / 8


@pytest.mark.parametrize(
    ("name", "teraflops"), [("h100-8", 989), ("a100-80-1", 312), ("4090-1", 165), ("t4-1", 65), ("v6e-8", 918)]
)
def test_a_step_takes_at_least_its_flops_at_the_peak(name: str, teraflops: float) -> None:
    """T4 has no bfloat16 matmuls: its peak is that of float16, which no emulation can exceed."""
    sizes, on = footprint(ResolvedJob(job("llama3.2-1b"))), slice_named(name)
    bound = sizes.lower_bound_seconds(on.chip, on.devices)
    assert bound == pytest.approx(sizes.flops / (teraflops * 1e12 * on.devices))
    mesh = MeshShape(1, on.devices, 1)
    assert sizes.guessed_seconds(on, mesh, 1, 4, Remat(policy="full")) > bound


def test_the_bound_without_a_known_peak_is_zero() -> None:
    chip = replace(slice_named("v6e-8").chip, bf16_flops=None)
    assert footprint(ResolvedJob(job("llama3.2-1b"))).lower_bound_seconds(chip, 8) == 0


def test_communication_and_offload_follow_the_links() -> None:
    """Eight GPUs over PCIe wait for the weights, over NVLink they do not."""
    wanted = job("llama3.2-1b", batch=64, sequence=2048)
    sizes, fsdp, copies = footprint(ResolvedJob(wanted)), MeshShape(1, 8, 1), MeshShape(8, 1, 1)
    full = Remat(policy="full")

    def ratio(name: str) -> float:
        on = slice_named(name)
        return sizes.guessed_seconds(on, fsdp, 1, 8, full) / sizes.guessed_seconds(on, copies, 1, 8, full)

    assert ratio("4090-8") > 1.5
    assert ratio("h100-8") < 1.3
    near, far = slice_named("h100-8"), slice_named("h100-4x2")
    assert sizes.guessed_seconds(far, copies, 8, 1, full) > sizes.guessed_seconds(near, copies, 8, 1, full)
    offload = Remat(policy="named", offload=("layer_in",))
    slow = sizes.guessed_seconds(slice_named("l4-1"), MeshShape(1, 1, 1), 1, 64, offload)
    assert slow >= 2 * sizes.tokens * sizes.widths["layer_in"] * 2 / 32e9


def test_counting_needs_no_jax(tmp_path: Path) -> None:
    """A search that finds all its answers in the cache would take several times as long with jax."""
    program = f"""
import sys
from forerun.config.schema import Job
from forerun.planner.search.lower_bound import decoder_footprint, footprint
from forerun.resolve.resolved_job import ResolvedJob
job = Job.model_validate({{"model": {folder_of(CONFIGS["gemma2"], tmp_path)!r}, "data": "nothing", "steps": 10}})
assert footprint(ResolvedJob(job)).parameters > 0
assert "jax" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def rate(name: str, size: int, stride: int) -> float:
    return LinkSpeeds.of(slice_named(name)).collective_bytes_per_second(size, stride)


def test_a_ring_of_tpus_uses_both_directions_of_a_link() -> None:
    link = slice_named("v6e-8").chip.link_bytes_per_second
    assert link is not None
    assert rate("v6e-8", 8, 1) == rate("v6e-16", 2, 8) == 2 * link


@pytest.mark.parametrize(
    ("name", "size", "stride", "gigabytes_per_second"),
    [
        ("h100-8", 8, 1, 450 * NVLINK_SHARE),
        ("a100-80-8", 2, 4, 300 * NVLINK_SHARE),
        ("4090-8", 8, 1, 32 * PCIE_SHARE),
        ("h100-8x2", 8, 1, 450 * NVLINK_SHARE),  # within each machine
        ("h100-8x2", 2, 8, 50 * NETWORK_SHARE),  # every GPU has one partner in the other machine
        ("h100-8x2", 16, 1, 8 * 50 * NETWORK_SHARE),  # eight GPUs of a machine share the traffic; less than NVLink
        ("b200-8x2", 4, 4, 2 * 50 * NETWORK_SHARE),
    ],
)
def test_gpus(name: str, size: int, stride: int, gigabytes_per_second: float) -> None:
    assert rate(name, size, stride) == pytest.approx(gigabytes_per_second * 1e9)


def test_offload_uses_pcie() -> None:
    assert LinkSpeeds.of(slice_named("h100-8")).host_bytes_per_second == pytest.approx(64e9 * PCIE_SHARE)
    assert LinkSpeeds.of(slice_named("l4-1")).host_bytes_per_second == pytest.approx(32e9 * PCIE_SHARE)
