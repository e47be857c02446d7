"""The text part of multimodal checkpoints against transformers: logits, greedy text, exports and adapters."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from wrappers_reference import (
    CHECKPOINTS,
    PROCESSORS,
    checkpoint,
    float8_checkpoint,
    float8_reference,
    others,
    reference,
    reference_logits,
)

from forerun.config.load import load
from forerun.config.schema import Model as Section
from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.models.model_facts import ModelFacts, model_of
from forerun.nn.compute import Compute
from forerun.program.build import make_mesh
from forerun.run.train import train
from forerun.track.display.make_display import make_display
from forerun.trained_model.load_model import abstract_plain_params, pretrained_params
from forerun.verbs.export.export import export

# PEFT looks for the keys of rank_pattern only among modules, and warns about those of parameters, which it applies.
UNMATCHED = "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(UNMATCHED)]
TOKENS = np.random.default_rng(2).integers(1, 256, (2, 24)).astype(np.int32)  # longer than the window
TEXT = "All work and no play makes a dull model; " * 60


@cache
def loaded(folder: Path) -> tuple[Any, Any, Any]:
    section, mesh = Section(name=str(folder)), make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    model = model_of(section)
    return model, pretrained_params(ModelFacts(section), abstract_plain_params(model, mesh, "float32")), mesh


def our_logits(folder: Path) -> np.ndarray:
    model, params, mesh = loaded(folder)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1], dtype=jnp.int32), TOKENS.shape)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda p, t: model.apply(p, t, jnp.ones_like(t), positions, Compute()).logits())
        return np.asarray(found(params, TOKENS))


def trained(folder: Path, model: Path, *more: str) -> Path:
    """A run of two steps on bytes."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "job.yaml").write_text(
        f"name: run\nmodel: {model}\ndata: {{path: text.txt}}\nsequence: 32\nbatch: 8\nsteps: 2\ndevices: 1\n"
        f"device: cpu\nsample: {{tokens: 0}}\noptimizer: {{lr: 1.0e-2, warmup: 0}}\nruns: {folder / 'runs'}\n"
    )
    with make_display(io.StringIO()) as display:
        train(load(folder / "job.yaml", list(more)).job, display)
    return folder / "runs" / "run"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_transformers(name: str) -> None:
    folder = checkpoint(name)
    expected = reference_logits(reference(folder), TOKENS)
    assert np.abs(our_logits(folder) - expected).max() < 1e-4
    assert np.abs(expected).max() > 1


def test_greedy_text_is_that_of_transformers() -> None:
    """tests/contract/test_greedy.py compares the greedy text of all families, whose text part this is."""
    import torch

    folder, prompt = checkpoint("mistral3, published"), [5, 17, 3, 90, 11, 42, 8]
    model, params, mesh = loaded(folder)
    engine = Engine(model, params, mesh, Compute(), frozenset(), model.vocab)
    ours = [step[0] for step in Stream(engine, [prompt], Settings(16, Sampling(temperature=0)))]
    theirs, ids = reference(folder), torch.tensor([prompt])
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    assert ours == out[0, len(prompt) :].tolist()


# The test of adapters exports the other kinds.
@pytest.mark.parametrize("name", ["mistral3, published", "qwen3_5_moe, published", "gemma4, experts"])
def test_export_keeps_the_other_parts(name: str, tmp_path: Path) -> None:
    base = checkpoint(name)
    done = export(str(trained(tmp_path, base)), str(tmp_path / "out"))
    assert others(done.folder) == others(base)
    copied = [one for one in others(base) if not one.endswith("layer_scalar")]
    assert f"The {len(copied)} tensors" in done.proof
    assert set(load_file(done.folder / "model.safetensors")) == set(load_file(base / "model.safetensors"))
    assert json.loads((done.folder / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    for file in PROCESSORS:
        assert (done.folder / file).read_bytes() == (base / file).read_bytes()
    after = reference_logits(reference(done.folder), TOKENS)
    assert np.abs(after - our_logits(done.folder)).max() < 1e-4
    assert np.abs(after - reference_logits(reference(base), TOKENS)).max() > 1e-2


LAYER = "base_model.model.model.language_model.layers."


@pytest.mark.parametrize(
    ("name", "targets", "modules"),
    [
        ("gemma3, names of modules", "[q_proj, down_proj]", 4),
        ("qwen3_5", "all-linear", 5 + 4 + 2 * 3),
        # Per layer, a shared expert and two parameters of experts.
        pytest.param("qwen3_5_moe, published", "all-linear", 5 + 4 + 2 * (3 + 2), marks=pytest.mark.slow),
        ("gemma4", "all-linear", 2 * 4 + 2 * 2 + 4 * 3),  # two layers have no keys and values
        # The global layer has no matrix for values. The routers are linear layers here.
        pytest.param("gemma4, experts", "[all-linear, router]", 4 + 3 + 2 * (3 + 1 + 2), marks=pytest.mark.slow),
    ],
)
def test_adapters_have_the_modules_of_the_wrapper(name: str, targets: str, modules: int, tmp_path: Path) -> None:
    """PEFT loads them, it saves the same names, and no module of another part gets an adapter."""
    import peft

    base = checkpoint(name)
    run = trained(tmp_path, base, "lora.rank=4", f"lora.targets={targets}", "lora.base=float32")
    adapter = export(str(run), str(tmp_path / "adapter")).folder
    merged = export(str(run), str(tmp_path / "merged"), merge=True).folder
    assert others(merged) == others(base)
    wrapped = peft.PeftModel.from_pretrained(reference(base), adapter).eval()
    ours = load_file(adapter / "adapter_model.safetensors")
    assert ours.keys() == peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys()
    assert len(ours) == 2 * modules
    assert f"{LAYER}1.self_attn.q_proj.lora_A.weight" in ours
    if name.startswith("qwen3_5"):
        assert f"{LAYER}0.linear_attn.in_proj_qkv.lora_A.weight" in ours
    expected = reference_logits(reference(merged), TOKENS)
    assert np.abs(reference_logits(wrapped, TOKENS) - expected).max() < 1e-4
    assert np.abs(expected - reference_logits(reference(base), TOKENS)).max() > 1e-3


def test_integers_leave_the_vision_tower_unrounded(tmp_path: Path) -> None:
    base = checkpoint("gemma3")
    run = trained(tmp_path, base, "qat.weights=int8", "qat.targets=[q_proj, up_proj]")
    done = export(str(run), str(tmp_path / "out")).folder
    assert others(done) == others(base)
    section = json.loads((done / "config.json").read_text())["quantization_config"]
    assert "re:.*vision_tower.*" in section["ignore"]
    model = reference(done)
    assert np.abs(reference_logits(model, TOKENS) - our_logits(done)).max() < 1e-4
    rounded = {name for name, one in model.named_modules() if hasattr(one, "quantization_scheme")}
    layers = [f"model.language_model.layers.{n}." for n in range(2)]
    assert rounded == {layer + name for layer in layers for name in ("self_attn.q_proj", "mlp.up_proj")}


def test_float8_is_dequantized_and_exported_as_bfloat16(tmp_path: Path) -> None:
    base = float8_checkpoint()
    expected = reference_logits(float8_reference(base), TOKENS)
    assert np.abs(our_logits(base) - expected).max() < 1e-4
    run = trained(tmp_path, base, "lora.rank=4", "lora.targets=[q_proj]")
    done = export(str(run), str(tmp_path / "out"), merge=True).folder
    assert others(done) == others(base)
    assert "quantization_config" not in json.loads((done / "config.json").read_text())
    tensors = load_file(done / "model.safetensors")
    assert {str(one.dtype) for one in tensors.values()} == {"bfloat16"}
    assert not [name for name in tensors if "scale" in name]
    assert np.abs(reference_logits(reference(done), TOKENS) - our_logits(done)).max() < 1e-4
