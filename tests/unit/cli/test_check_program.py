"""`forerun check` prints the facts of the Program that `train` builds: kernel, method and parameters."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from forerun.cli.main import main
from forerun.config.load import load
from forerun.hardware import devices
from forerun.hardware.mesh import MeshShape
from forerun.models.sizes import SIZES
from forerun.nn import sharding
from forerun.nn.spec import count
from forerun.program.build import Program, build
from forerun.program.kernels import job_attention
from forerun.reporter import SILENT
from forerun.resolve.derive import derive
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import Count
from forerun.verbs.check import values as check

Capture = pytest.CaptureFixture[str]
Check = Callable[..., dict[str, tuple[str, str]]]
GEMMA2 = {  # the only family whose attention scores have a soft cap
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "vocab_size": 512,
}
# For each slice the kind of its devices, as jax spells it.
SLICES = {"v3-8": "TPU v3", "v4-8": "TPU v4", "v5e-1": "TPU v5 lite", "v5p-8": "TPU v5", "v6e-1": "TPU v6 lite"}
GPU, CPU = ("gpu", "NVIDIA H100 80GB HBM3"), ("cpu", "cpu")
MODELS = ("qwen3-0.6b", "llama3.2-1b", "mistral-7b", "./gemma2")


@dataclass(frozen=True)
class FakeDevice:
    """A device that exists only by name: `build` does not touch arrays."""

    platform: str
    device_kind: str
    id: int = 0
    process_index: int = 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("gemma2").mkdir()
    Path("gemma2/config.json").write_text(json.dumps(GEMMA2), "utf-8")
    return tmp_path


@pytest.fixture
def derived(capsys: Capture) -> Check:
    """Run `check` and return the derived rows: name -> (value, reason)."""

    def run(*words: str) -> dict[str, tuple[str, str]]:
        assert main(["check", "job.yaml", *words]) == 0, capsys.readouterr().err
        text = capsys.readouterr().out.split("\nderived for ")[1]
        joined = re.sub(r"\n {9,}(?=\S)", "  ", text)
        lines = [re.split(r"\s{2,}", line.strip()) for line in joined.splitlines() if line.startswith("  ")]
        return {name: (value, reason) for name, value, reason in lines}

    return run


def write_job(text: str) -> None:
    Path("job.yaml").write_text(f"data: gs://bucket/texts\nsteps: 9\nbatch: 8\n{text}\n", "utf-8")


def program_on(platform: str, kind: str) -> Program:
    """Build the job's Program for one device that is not here."""
    job, device = load("job.yaml").job, np.array([[[FakeDevice(platform, kind)]]], dtype=object)
    mesh = Mesh(device, sharding.AXES, axis_types=(AxisType.Auto,) * 3)
    return build(ResolvedJob(job), mesh, derive(job, MeshShape(1, 1, 1), None))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("slice_name", SLICES)
def test_kernel_on_a_slice_is_that_of_the_program(slice_name: str, model: str, derived: Check) -> None:
    write_job(f"model: {model}")
    program = program_on("tpu", SLICES[slice_name])
    place = check.place_on(slice_name, load("job.yaml").job)
    resolved = resolve_model(load("job.yaml").job)
    kernel = job_attention(resolved, resolved.model, place.platform, place.jax_kind).kernel
    assert kernel == program.compute.attention
    assert derived("--on", slice_name)["attention kernel"][0] == program.compute.attention.name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("place", [GPU, CPU], ids=["gpu", "cpu"])
def test_kernel_here_is_that_of_the_program(
    place: tuple[str, str], compute: str, model: str, derived: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = devices.DeviceChoice(place[0], (FakeDevice(*place),), "for the test")
    monkeypatch.setattr(devices, "choose", lambda wanted, number, probe=None: chosen)
    write_job(f"model: {model}\nprecision: {{compute: {compute}}}")
    program = program_on(*place)
    assert derived()["attention kernel"][0] == program.compute.attention.name
    if place == GPU:  # cuDNN has neither a soft cap nor float32
        assert program.compute.attention.name == ("cudnn" if compute == "bfloat16" and "gemma" not in model else "xla")


GATHERS = "xla_tpu_enable_sparse_core_collective_offload_all_gather=true"
WINDOWS = "xla_tpu_enable_windowed_einsum_for_all_gather=false"


@pytest.mark.parametrize(
    ("slice_name", "more", "shown", "hidden"),
    [
        ("v6e-1", "", ["xla_tpu_scoped_vmem_limit_kib=98304"], [GATHERS, WINDOWS]),
        ("v6e-8", "", ["xla_tpu_scoped_vmem_limit_kib=98304", GATHERS, WINDOWS], []),
        ("v5e-8", "", ["xla_tpu_overlap_compute_collective_tc=true"], [GATHERS, WINDOWS]),
        ("v5e-8", "mesh: {tp: 2}", ["xla_tpu_overlap_compute_collective_tc=true", WINDOWS], [GATHERS]),
        ("v5p-8", "", [], [GATHERS, WINDOWS]),
        (
            "v6e-8",
            "compiler_options: {xla_tpu_scoped_vmem_limit_kib: 81920}",
            ["xla_tpu_scoped_vmem_limit_kib=81920"],
            [],
        ),
    ],
)
def test_compiler_options_are_shown(
    slice_name: str, more: str, shown: list[str], hidden: list[str], capsys: Capture
) -> None:
    write_job(f"model: qwen3-0.6b\n{more}")
    assert main(["check", "job.yaml", "--on", slice_name]) == 0
    text = capsys.readouterr().out.split("\nderived for ")[1]
    assert [one for one in shown if one not in text] == []
    assert [one for one in hidden if one in text] == []


@pytest.mark.parametrize("slice_name", SLICES)
def test_compiler_options_are_those_of_the_program(slice_name: str) -> None:
    write_job("model: smollm2-135m\ncompiler_options: {xla_tpu_of_the_job: 3}")
    job, program = load("job.yaml").job, program_on("tpu", SLICES[slice_name])
    place = check.place_on(slice_name, job)
    one_device = dataclasses.replace(place, devices=1)
    found = check.outcome_of(resolve_model(job), one_device, SILENT).options.values
    assert found == program.compiler_options
    assert found["xla_tpu_of_the_job"] == "3"


def lora_parameters(name: str, rank: int) -> int:
    """Count the adapters of all linear weights by hand: rank x (inputs + outputs) for each matrix."""
    c = SIZES[name]
    queries, values = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = [(c.embed, queries), (c.embed, values), (c.embed, values), (queries, c.embed)]
    mlp = [(c.embed, c.mlp), (c.embed, c.mlp), (c.mlp, c.embed)]
    return c.layers * sum(rank * (ins + outs) for ins, outs in attention + mlp)


def decoder_parameters(name: str) -> int:
    """Count the weights of a Llama-like decoder with tied embeddings and without biases by hand."""
    c = SIZES[name]
    matrices = 2 * c.embed * (c.heads + c.kv_heads) * c.head_dim + 3 * c.embed * c.mlp
    norms = 2 * c.embed + (2 * c.head_dim if c.qk_norm else 0)
    return c.vocab * c.embed + c.layers * (matrices + norms) + c.embed


METHODS: dict[str, tuple[str, int]] = {
    "all weights": ("", decoder_parameters("smollm2-135m")),
    "lora": ("lora: {rank: 8}", lora_parameters("smollm2-135m", 8)),
    "quantized lora": ("lora: {rank: 4, base: nf4}", lora_parameters("smollm2-135m", 4)),
    "qat": ("qat: {weights: int8}", decoder_parameters("smollm2-135m")),
    "qat with lora": ("qat: {}\nlora: {rank: 16}", lora_parameters("smollm2-135m", 16)),
    "distil": ("distil: {teacher: smollm2-360m}", decoder_parameters("smollm2-135m")),
    "preferences": ("preferences: {reference: beside}", decoder_parameters("smollm2-135m")),
    "preferences with lora": ("preferences: {loss: ipo}\nlora: {rank: 8}", lora_parameters("smollm2-135m", 8)),
}


@pytest.mark.parametrize("name", METHODS)
def test_parameters_are_those_of_the_method(name: str, derived: Check) -> None:
    text, trainable = METHODS[name]
    write_job(f"model: smollm2-135m\n{text}")
    rows = derived("--on", "v6e-1")
    assert rows["parameters"][0] == str(Count(decoder_parameters("smollm2-135m")))
    assert rows["trainable"][0] == str(Count(trainable))
    sections = [line.partition(":")[0] for line in text.splitlines()]
    assert set(re.split(r", ", rows["method"][0])) == set(sections or ["none"])
    program = program_on("tpu", "TPU v6 lite")
    assert sum(leaf.size for leaf in jax.tree.leaves(program.learning)) == trainable
    assert count(program.model.specs()) == decoder_parameters("smollm2-135m")


def test_lora_on_qwen3_is_shown(derived: Check) -> None:
    write_job("model: qwen3-0.6b\nlora: {rank: 8}")
    rows = derived("--on", "v6e-1")
    assert rows["parameters"][0] == "596M"
    assert rows["trainable"][0] == str(Count(lora_parameters("qwen3-0.6b", 8)))
    assert rows["method"][0] == "lora"
    assert "rank 8" in rows["method"][1]


def test_learned_scales_are_trainable(derived: Check) -> None:
    """Each group of 32 inputs has one scale, so a 32nd of all linear weights is added."""
    write_job("model: smollm2-135m\nqat: {scales: learned}\nprecision: {params: float32}")
    c: Any = SIZES["smollm2-135m"]
    linear = c.layers * (2 * c.embed * (c.heads + c.kv_heads) * c.head_dim + 3 * c.embed * c.mlp)
    expected = decoder_parameters("smollm2-135m") + linear // 32
    assert derived("--on", "v6e-1")["trainable"][0] == str(Count(expected))
