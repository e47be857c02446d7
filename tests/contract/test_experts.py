"""Mixture of experts: one device against eight, router losses, adapters of experts, and what is rejected."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import family_parity as parity
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families_reference import pair
from family_parity import LENGTH, LONG, ROWS
from lora_reference import checkpoint, job_in, torch_logits, torch_model, trained
from test_lora_steps import our_logits

from forerun.config.schema import Job, Remat
from forerun.config.schema import Model as Section
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.methods.method import method_of
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig, ExpertConfig
from forerun.models.layer_kinds import LayerKind
from forerun.models.model_facts import model_of
from forerun.nn import routing, sharding, spec
from forerun.nn.compute import Compute
from forerun.nn.rope import Rope
from forerun.nn.weights.experts import Experts
from forerun.nn.weights.lowrank import LowRank
from forerun.objectives.batch import Batch
from forerun.objectives.next_token import BALANCE, ENTROPY, LOAD, NextToken, RouterLosses
from forerun.program.build import make_mesh
from forerun.resolve.resolved_job import ResolvedJob
from forerun.verbs.export.export import export

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
RNG = np.random.default_rng(0)
MODEL = Decoder(
    DecoderConfig(
        layers=2, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=7, vocab=32, experts=ExpertConfig(4, 2, mlp=16)
    )
)
SEGMENTS = np.repeat(np.array([[1, 1, 1, 1, 1, 1, 0, 0]], np.int32), 8, axis=0)  # two positions of padding
BATCH = Batch(
    RNG.integers(0, 32, (8, 8)).astype(np.int32),
    RNG.integers(0, 32, (8, 8)).astype(np.int32),
    (SEGMENTS > 0).astype(np.float32),
    SEGMENTS,
    np.tile(np.arange(8, dtype=np.int32), (8, 1)),
)


def adapted(weight: Any) -> Any:
    """The specs of experts with adapters of rank 4."""
    if not isinstance(weight, Experts):
        return weight
    value = weight.value
    layers, experts, inputs, outputs = value.shape
    down = replace(value, shape=(layers, experts, inputs, 4), axes=f"{value.axes[:3]}R")
    up = replace(value, shape=(layers, experts, 4, outputs), axes=f"LXR{value.axes[3]}")
    return LowRank(base=weight, down=down, up=up, inputs=1, scale=0.7)


SPECS = jax.tree.map(adapted, MODEL.specs(), is_leaf=lambda leaf: isinstance(leaf, Experts))
PARAMS = spec.map_specs(lambda s: RNG.normal(0 if s.decay else 1, 0.3, s.shape).astype(np.float32), SPECS)


def loss(params: Any, batch: Batch[jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    sums = NextToken(8, RouterLosses(0.1, 0.01))(MODEL, params, batch, Compute())
    return sums.total / sums.weight, sums.told


@pytest.fixture(scope="module")
def on_one_device() -> Any:
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, BATCH)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (MeshShape(2, 2, 2), (2, 4 // 2, 16 // 2, 16)),
        (MeshShape(1, 2, 2, expert=2), (2, 4 // 4, 16 // 2, 16)),
        (MeshShape(2, 1, 1, expert=4), (2, 4 // 4, 16, 16)),
    ],
    ids=str,
)
def test_the_gradients_on_eight_devices_are_those_on_one(
    shape: MeshShape, part: tuple[int, ...], on_one_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All axes split the batch, the experts or their width; adapters and router losses are included.

    With the axis expert, the busiest device needs several rounds.
    """
    (value, told), gradients = on_one_device
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 16)  # these matrices count as large
    monkeypatch.setattr(routing, "MULTIPLE", 4)
    monkeypatch.setattr(routing, "ROOM", 0.7)
    step = jax.jit(jax.value_and_grad(partial(loss), has_aux=True))
    mesh = make_mesh(shape, jax.devices())
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda s, x: jax.device_put(x, sharding.stored(mesh, s.shape, s.axes)), SPECS, PARAMS, is_leaf=spec.is_spec
        )
        batch = jax.tree.map(lambda x: jax.device_put(x, sharding.batched(mesh, x.shape, "BS")), BATCH)
        down = params.blocks.expert_down.base.value
        assert down.sharding.shard_shape(down.shape) == part
        (other_value, other_told), others = step(params, batch)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    for name in told:
        np.testing.assert_allclose(other_told[name], told[name], rtol=1e-5)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(others), strict=True
    ):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(other, leaf, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("kinds", "ordered"), [(1, False), (2, True)])
def test_only_a_period_of_several_layers_is_computed_again_in_order(kinds: int, ordered: bool) -> None:
    """The compiler could gather the experts of all its layers together. Single layers are in order anyway."""
    rope = Rope(1e4, 8)
    periods = tuple(LayerKind(window, rope) for window in (4, None)[:kinds])
    model = Decoder(replace(MODEL.config, layers=4, kinds=periods))
    params = spec.map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), model.specs())

    def value(params: Any) -> jax.Array:
        sums = NextToken(8)(model, params, BATCH, Compute(remat=Remat(policy="full")))
        return sums.loss / sums.weight

    text = str(jax.make_jaxpr(jax.grad(value))(params))
    found = ("prevent_cse=True" in text, "prevent_cse=False" in text)
    assert found == (ordered, not ordered)


def test_adapters_give_the_logits_of_the_merged_experts() -> None:
    merged = jax.tree.map(
        lambda leaf: Experts(value=leaf.matrix("", jnp.float32), share=0.5) if isinstance(leaf, LowRank) else leaf,
        PARAMS,
        is_leaf=lambda leaf: isinstance(leaf, LowRank),
    )

    def logits(params: Any) -> Any:
        return MODEL.apply(params, BATCH.tokens, BATCH.segments, BATCH.positions, Compute()).logits()

    np.testing.assert_allclose(jax.jit(logits)(PARAMS), jax.jit(logits)(merged), atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["qwen3-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "qwen3.5-moe"))]
)
def test_the_balance_loss_and_its_gradient_are_those_of_transformers(name: str) -> None:
    """On padded rows: padding counts in neither."""
    import torch

    one = pair(name)
    rows = jax.tree.map(lambda array: array[: len(LONG)], ROWS)
    mask = torch.from_numpy(rows.segments > 0).long()
    one.reference.zero_grad()
    answer = one.reference(
        input_ids=torch.from_numpy(rows.tokens).long(), attention_mask=mask, use_cache=False, output_router_logits=True
    )
    answer.aux_loss.backward()
    for leaf in one.reference.parameters():
        leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    expected = one.params_of(parity.stored_gradients(one))
    one.reference.zero_grad()

    def loss(params: Any) -> jax.Array:
        sums = NextToken(LENGTH, RouterLosses(balance=1.0))(one.model, params, rows, Compute())
        assert sums.penalty is not None
        return sums.penalty / sums.weight

    value, got = jax.jit(jax.value_and_grad(loss))(one.params)
    np.testing.assert_allclose(value, answer.aux_loss.item(), rtol=1e-5)
    stacks = expected.blocks.values() if isinstance(expected.blocks, dict) else [expected.blocks]
    assert all(parity.norm_of(stack.router) > 0.01 for stack in stacks)
    errors = parity.gradient_errors(expected, got)
    assert max(errors.values()) < parity.GRADIENTS_LIMIT, errors


@pytest.mark.torch
def test_adapters_of_experts_learn_and_are_merged(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base", "Qwen3Moe", head_dim=8, **EXPERTS)
    rows = trained(job_in(tmp_path, "{rank: 4, base: float32}"))
    assert rows[0]["loss"] - rows[-1]["loss"] > 0.2
    assert all(0 < row[ENTROPY] <= 1 <= row[LOAD] <= 8 and row[BALANCE] > 0 for row in rows)
    run = tmp_path / "runs" / "run"
    export(str(run), str(tmp_path / "merged"), merge=True)
    ids = np.frombuffer(b"7 apples and 3 pears are 10 fruits", np.uint8)
    before, after = (torch_logits(torch_model(tmp_path / name), ids) for name in ("base", "merged"))
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(after, our_logits(run), atol=1e-4)


@pytest.mark.parametrize(
    ("model", "changes", "code"),
    [
        ("qwen3-0.6b", {"experts": {"balance_loss": 0.1}}, "E-METHOD-040"),
        ("qwen3-30b-a3b", {"experts": {"z_loss": 0.1}, "preferences": "dpo"}, "E-METHOD-041"),
        ("qwen3-30b-a3b", {"qat": {}}, "E-METHOD-042"),
    ],
)
def test_rejected_before_anything_is_compiled(model: str, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError) as raised:
        method_of(ResolvedJob(Job(model=Section(name=model, vocab=1000), data="unread", **changes)), chunk=1)
    assert raised.value.code == code


@pytest.mark.parametrize("key", ["dora", "dropout"])
def test_dora_and_dropout_of_experts_are_rejected_and_those_of_the_attention_are_not(key: str) -> None:
    value = {"dora": True, "dropout": 0.1}[key]

    def specs(**lora: Any) -> Any:
        job = Job(model=Section(name="qwen3-30b-a3b", vocab=1000), data="unread", lora=lora)
        return method_of(ResolvedJob(job), chunk=1).specs(model_of(job.model).specs())

    with pytest.raises(UserError) as raised:
        specs(**{key: value})
    assert raised.value.code == "E-METHOD-043"
    assert specs(**{key: value, "targets": ["q_proj"]}).blocks.query.down.shape == (48, 2048, 8)
    adapted = specs()
    assert adapted.blocks.expert_down.down.shape == (48, 128, 768, 8)
    assert not hasattr(adapted.blocks.router, "down")  # routers stay frozen
