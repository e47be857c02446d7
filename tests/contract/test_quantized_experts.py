"""QLoRA with experts: a model whose frozen experts are quantized computes what the dequantized model computes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora_reference import checkpoint, job_in, rounded, torch_logits, torch_model, trained
from test_experts import BATCH, EXPERTS, MODEL, loss
from test_lora_steps import IDS, our_logits

from forerun.checkpoint.reader import newest_step
from forerun.config.training_method import Lora
from forerun.hardware.mesh import MeshShape
from forerun.methods.lora import LoraTransform
from forerun.models.keys import path_text
from forerun.nn import sharding, spec
from forerun.nn.weights.dense import Dense, is_weight
from forerun.nn.weights.experts import Experts
from forerun.nn.weights.lowrank import LowRank
from forerun.nn.weights.quantized import Quantized, quantized
from forerun.program.build import make_mesh
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run_folder.run_folder import RunFolder
from forerun.trained_model.load_model import fsdp_mesh, method_params
from forerun.verbs.export.export import export

NAMES = {"blocks.router": "model.layers.{}.mlp.gate"}
STACKS = ("expert_gate", "expert_up", "expert_down")


def parameters(kind: str, block: int) -> tuple[Any, Any]:
    """The specs and values of the model with a quantized base and adapters that are not zero."""
    rng = np.random.default_rng(0)
    transform = LoraTransform(Lora(rank=4, base=kind, block=block), "float32", NAMES)  # type: ignore[arg-type]
    reads = transform.reads(MODEL.specs())
    dense = spec.map_specs(lambda s: rng.normal(0 if s.decay else 1, 0.3, s.shape).astype(np.float32), MODEL.specs())

    def leaf(wanted: Any, weight: Any) -> Any:
        return quantized(jnp.asarray(weight.value), wanted) if isinstance(wanted, Quantized) else weight

    base = jax.tree.map(leaf, reads, dense, is_leaf=lambda x: is_weight(x) or spec.is_spec(x))
    params = transform.start(reads, base, {}, jax.random.key(0))
    specs = transform.specs(reads)

    def moved(s: Any, x: Any) -> Any:
        return x + rng.normal(0, 0.1, x.shape).astype(np.float32) if s.trainable else x

    return specs, jax.tree.map(moved, specs, params, is_leaf=spec.is_spec)


def dequantized(params: Any) -> Any:
    """The same parameters with dense frozen matrices, each expert by itself."""

    def leaf(weight: Any) -> Any:
        if not isinstance(weight, LowRank) or not isinstance(weight.base, Quantized):
            return weight
        base = weight.base
        if base.share is None:
            return replace(weight, base=Dense(base.matrix("", jnp.float32)))
        layers, experts = base.codes.shape[:2]
        alone = [
            replace(base, codes=base.codes[n, e], scales=base.scales[n, e], share=None).matrix(base.axes, jnp.float32)
            for n in range(layers)
            for e in range(experts)
        ]
        whole = jnp.stack(alone).reshape(layers, experts, *base.shape)
        return replace(weight, base=Experts(value=whole, share=base.share))

    return jax.tree.map(leaf, params, is_leaf=is_weight)


def adapters_of(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {path_text(path): leaf for path, leaf in flat if path_text(path).endswith((".down", ".up"))}


def gradients(specs: Any) -> Any:
    """A function of parameters and a batch: the loss, and the gradients of the adapters."""

    def of(params: Any, batch: Any) -> Any:
        learned, frozen = spec.split(params, spec.map_specs(lambda s: s.trainable, specs))
        value, found = jax.value_and_grad(lambda learned: loss(spec.merge(learned, frozen), batch)[0])(learned)
        return value, adapters_of(found)

    return of


@pytest.mark.parametrize(
    ("kind", "block"),
    [("nf4", 8), *(pytest.param(kind, 16, marks=pytest.mark.slow) for kind in ("int4", "int8"))],
)
def test_losses_and_gradients_are_those_of_the_dequantized_base(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device and on eight: data, fsdp and tp split batch, experts and width. tp cannot split a block of 16."""
    specs, params = parameters(kind, block)
    assert isinstance(params.blocks.router, Dense)
    of = gradients(specs)
    value, found = jax.jit(of)(params, BATCH)
    plain = dequantized(params)
    expected_value, expected = jax.jit(gradients(specs_of(plain)))(plain, BATCH)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert set(found) == set(expected)
    for name in expected:
        assert np.abs(expected[name]).max() > 1e-4, name
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6, rtol=1e-4, err_msg=name)

    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 16)  # these matrices count as large
    mesh = make_mesh(MeshShape(2, 2, 2), jax.devices())
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda s, x: jax.device_put(x, sharding.stored(mesh, s.shape, s.axes)), specs, params, is_leaf=spec.is_spec
        )
        batch = jax.tree.map(lambda x: jax.device_put(x, sharding.batched(mesh, x.shape, "BS")), BATCH)
        codes = placed.blocks.expert_down.base.codes
        tp = 2 if 16 // block % 2 == 0 else 1
        assert codes.sharding.shard_shape(codes.shape)[1:3] == (4 // 2, 16 // block // tp)
        other_value, others = jax.jit(of)(placed, batch)
        text = str(jax.make_jaxpr(of)(placed, batch))
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    for name in found:
        np.testing.assert_allclose(others[name], found[name], atol=1e-5, err_msg=name)
    width = "i8" if kind == "int8" else "u8"
    gathered = set(re.findall(r":(\w+)\[([\d,]+)\] = all_gather", text))
    assert any(dtype == width for dtype, _ in gathered), "the codes cross the mesh"
    assert not {("f32", "4,16,16"), ("bf16", "4,16,16")} & gathered, "no dense matrices cross the mesh"


def specs_of(params: Any) -> Any:
    """Specs with the right flags for parameters with a dense frozen base."""
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    made = [
        spec.ParamSpec(x.shape, "-" * x.ndim, spec.Fill(0), trainable=path_text(path).endswith((".down", ".up")))
        for path, x in flat
    ]
    return jax.tree.unflatten(structure, made)


def test_no_dense_experts_of_all_layers_wait_for_the_backward_pass() -> None:
    specs, params = parameters("nf4", 8)
    text = str(jax.make_jaxpr(gradients(specs))(params, BATCH))
    assert "f32[4,16,16]" in text, "the experts of one layer"
    assert "f32[2,4,16,16]" not in text


@pytest.mark.torch
def test_a_run_reads_trains_resumes_and_exports_quantized_experts(tmp_path: Path) -> None:
    """The codes are read from files, one expert at a time, on two devices. A resumed run is bit for bit the same."""
    base = checkpoint(tmp_path / "base", "Qwen3Moe", head_dim=8, **EXPERTS)
    jobs = [job_in(tmp_path, "{rank: 4, base: nf4, block: 16}", f"name={name}", "devices=2") for name in ("run", "cut")]
    rows = trained(jobs[0])
    assert rows[0]["loss"] - rows[-1]["loss"] > 0.2
    run = tmp_path / "runs" / "run"
    folder = RunFolder(run)
    params = method_params(folder, newest_step(folder.checkpoints(jobs[0])), ResolvedJob(jobs[0]), fsdp_mesh(jobs[0]))
    tensors = torch_model(base).state_dict()
    for layer in range(2):
        gate, up = (
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"].numpy().reshape(8, 2, 16, 32).swapaxes(0, 1)
        )
        down = tensors[f"model.layers.{layer}.mlp.experts.down_proj"].numpy()
        for name, stack in zip(STACKS, (gate, up, down), strict=True):
            ours = np.asarray(getattr(params.blocks, name).base.matrix("", jnp.float32))[layer]
            for expert in range(8):
                np.testing.assert_allclose(ours[expert].T, rounded(stack[expert], "nf4", 16), rtol=1e-6, atol=1e-7)

    trained(jobs[1])
    commits = tmp_path / "runs" / "cut" / "checkpoints" / "commits"
    max(commits.glob("*.json")).unlink()
    assert [row["loss"] for row in trained(jobs[1])] == [row["loss"] for row in rows]
    assert json.loads((tmp_path / "runs" / "cut" / "summary.json").read_text())["resumed_at"] == 15

    export(str(run), str(tmp_path / "merged"), merge=True)
    np.testing.assert_allclose(torch_logits(torch_model(tmp_path / "merged"), IDS), our_logits(run), atol=1e-4)
