"""gpt-oss beyond the tables of families: devices, MXFP4 files, a quantized base, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from lora_reference import checkpoint, job_in, torch_logits, torch_model, trained
from safetensors.numpy import load_file, save_file
from test_experts import BATCH, adapted
from test_lora_steps import IDS, our_logits
from test_wrappers import loaded

from forerun.config.schema import Job
from forerun.config.schema import Model as Section
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.methods.method import method_of
from forerun.models.base import require_split_sequences
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import ClampedGate, DecoderConfig, ExpertConfig
from forerun.models.layer_kinds import LayerKind
from forerun.models.model_facts import model_of
from forerun.nn import routing, sharding, spec
from forerun.nn.compute import Compute
from forerun.nn.rope import Rope
from forerun.nn.weights.experts import Experts
from forerun.objectives.next_token import NextToken, RouterLosses
from forerun.program.build import make_mesh
from forerun.resolve.resolved_job import ResolvedJob
from forerun.verbs.export.export import export

ROPE = Rope(1e4, 8)
MODEL = Decoder(
    DecoderConfig(
        layers=2, embed=16, heads=4, kv_heads=2, head_dim=8, mlp=16, vocab=32, qkv_bias=True, out_bias=True,
        attention_sinks=True, kinds=(LayerKind(3, ROPE), LayerKind(None, ROPE)),
        experts=ExpertConfig(4, 2, mlp=16, bias=True, clamped=ClampedGate(1.702, 0.7)),
    )
)  # fmt: skip
SPECS = jax.tree.map(adapted, MODEL.specs(), is_leaf=lambda leaf: isinstance(leaf, Experts))
RNG = np.random.default_rng(1)
PARAMS = spec.map_specs(lambda s: RNG.normal(0 if s.decay else 1, 0.3, s.shape).astype(np.float32), SPECS)
GPT_OSS = {
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 8,
}
EXPERTS = "model.layers.{}.mlp.experts."


def loss(params: Any, batch: Any) -> jax.Array:
    sums = NextToken(8, RouterLosses(0.1, 0.01))(MODEL, params, batch, Compute())
    return sums.total / sums.weight


@pytest.fixture(scope="module")
def on_one_device() -> Any:
    return jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(MeshShape(2, 2, 2), marks=pytest.mark.slow),
        MeshShape(1, 2, 2, expert=2),
        pytest.param(MeshShape(1, 2, 1, expert=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradients_on_eight_devices_are_those_on_one(
    shape: MeshShape, on_one_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sinks, biases and adapters are included. With the axis expert, a device needs several rounds."""
    value, gradients = on_one_device
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 16)  # these matrices and biases count as large
    monkeypatch.setattr(routing, "MULTIPLE", 4)
    monkeypatch.setattr(routing, "ROOM", 0.7)
    mesh = make_mesh(shape, jax.devices())
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda s, x: jax.device_put(x, sharding.stored(mesh, s.shape, s.axes)), SPECS, PARAMS, is_leaf=spec.is_spec
        )
        batch = jax.tree.map(lambda x: jax.device_put(x, sharding.batched(mesh, x.shape, "BS")), BATCH)
        bias = params.blocks.expert_gate_bias
        assert bias.sharding.shard_shape(bias.shape)[1] == 4 // min(4, shape.expert * shape.fsdp)
        other_value, others = jax.jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(others), strict=True
    ):
        where = jax.tree_util.keystr(path)
        if not where.endswith("key_bias"):  # with RoPE, only a small part of it changes the shares
            assert np.abs(leaf).max() > 1e-4, where
        np.testing.assert_allclose(other, leaf, atol=1e-5, err_msg=where)


def with_mxfp4(folder: Path, to: Path) -> Path:
    """Write a copy of a checkpoint whose experts are random MXFP4 values; the rest is in bfloat16."""
    to.mkdir()
    rng, plain = np.random.default_rng(3), load_file(folder / "model.safetensors")
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in plain.items()}
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            path = EXPERTS.format(layer) + name
            experts, inputs, outputs = tensors.pop(path).shape
            groups = (experts, outputs, inputs // 32)
            tensors[f"{path}_blocks"] = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
            tensors[f"{path}_scales"] = rng.integers(121, 125, groups).astype(np.uint8)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return to


def logits_of(folder: Path) -> np.ndarray:
    """Return the logits of a checkpoint that forerun reads onto the device, in float32."""
    model, params, mesh = loaded(folder)
    positions = np.arange(len(IDS), dtype=np.int32)[None]
    with jax.set_mesh(mesh):
        apply = jax.jit(lambda *arrays: model.apply(*arrays, Compute()).logits())
        return np.asarray(apply(params, IDS[None].astype(np.int32), np.ones_like(positions), positions)[0])


@pytest.mark.torch
def test_an_mxfp4_checkpoint_is_trained_and_exported(tmp_path: Path) -> None:
    """transformers dequantizes the same files. The export has plain experts, which transformers loads again."""
    checkpoint(tmp_path / "plain", "GptOss", **GPT_OSS)
    base = with_mxfp4(tmp_path / "plain", tmp_path / "base")
    before = torch_logits(torch_model(base).float(), IDS)  # transformers dequantizes to a model in bfloat16
    np.testing.assert_allclose(logits_of(base), before, atol=1e-4)
    trained(job_in(tmp_path, "{rank: 4, targets: [q_proj]}", "steps=3"))
    done = tmp_path / "exported"
    export(str(tmp_path / "runs" / "run"), str(done), merge=True)
    assert "quantization_config" not in json.loads((done / "config.json").read_text())
    written = load_file(done / "model.safetensors")
    assert set(written) == set(load_file(tmp_path / "plain" / "model.safetensors"))
    assert {value.dtype.name for value in written.values()} == {"bfloat16"}
    after = torch_logits(torch_model(done).float(), IDS)
    np.testing.assert_allclose(after, logits_of(done), atol=1e-4)
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.slow
@pytest.mark.torch
def test_a_quantized_base_trains_and_is_merged(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base", "GptOss", **GPT_OSS)
    rows = trained(job_in(tmp_path, "{rank: 4, base: nf4, block: 16}", "devices=2"))
    assert rows[0]["loss"] - rows[-1]["loss"] > 0.2
    run = tmp_path / "runs" / "run"
    export(str(run), str(tmp_path / "merged"), merge=True)
    np.testing.assert_allclose(torch_logits(torch_model(tmp_path / "merged"), IDS), our_logits(run), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"qat": {}}, "E-METHOD-042"), ({"precision": {"matmul": "int8"}}, "E-METHOD-123")],
    ids=["qat", "int8"],
)
def test_rejected_methods(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError) as raised:
        method_of(ResolvedJob(Job(model=Section(name="gpt-oss-20b", vocab=1000), data="unread", **changes)), chunk=1)
    assert raised.value.code == code


def test_split_sequences_are_rejected() -> None:
    with pytest.raises(UserError) as raised:
        require_split_sequences(model_of(Section(name="gpt-oss-20b")), 2)
    assert raised.value.code == "E-MODEL-050"
