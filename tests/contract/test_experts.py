"""Mixture of experts: the losses of the routers against transformers, LoRA on experts, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_parity as parity
import jax
import numpy as np
import pytest
from families_reference import pair
from family_parity import LENGTH, LONG, ROWS
from lora_reference import checkpoint, job_in, torch_logits, torch_model, trained
from test_lora_steps import our_logits

from forerun.commands.export import export
from forerun.config.schema import Job, Precision
from forerun.config.schema import Model as Section
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.methods.method import method_of
from forerun.nn import sharding
from forerun.nn.compute import Compute
from forerun.objectives.next_token import NextToken
from forerun.objectives.router_losses import BALANCE, ENTROPY, LOAD, RouterLosses
from forerun.program.build import build, make_mesh
from forerun.program.derive import derive

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


@pytest.mark.torch
def test_the_balance_loss_and_its_gradient_are_those_of_transformers() -> None:
    """On padded rows: padding counts in neither."""
    import torch

    one = pair("qwen3-moe")
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
    assert parity.norm_of(expected.blocks.router) > 0.01
    errors = parity.gradient_errors(expected, got)
    assert max(errors.values()) < parity.GRADIENTS_LIMIT, errors


def stepped(shape: MeshShape, name: Path, lora: dict[str, Any] | None) -> tuple[Any, Any]:
    """Return the metrics and the optimizer's state after one step of the job on a mesh.

    The first moments are a tenth of the gradients. Updates of AdamW would amplify the rounding of small gradients.
    """
    job = Job(
        model=Section(name=str(name)),
        data="unread",
        sequence=LENGTH,
        batch=len(ROWS.tokens),
        steps=1,
        precision=Precision(compute="float32"),
        experts={"balance_loss": 0.1, "z_loss": 0.01},
        **({"lora": lora} if lora else {}),
    )
    program = build(
        job, pair("qwen3-moe").model, make_mesh(shape, jax.devices()[: shape.devices]), derive(job, shape, None)
    )
    given = {name: jax.device_put(pair("qwen3-moe").params, jax.tree.map(lambda leaf: leaf.sharding, like))
             for name, like in program.given.items()}  # fmt: skip
    state = program.initial_state(0, given)
    batch = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf.reshape(like.shape), like.sharding), ROWS, program.batch
    )
    state, metrics = program.trace().lower().compile()(state, batch, program.placed_schedule())
    return metrics, jax.device_get(state.optimizer)


@pytest.mark.torch
@pytest.mark.parametrize("lora", [None, {"rank": 4, "base": "float32"}], ids=["full", "lora"])
def test_a_step_with_router_losses_on_eight_devices(lora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)  # these matrices count as large
    one, whole = stepped(MeshShape(1, 1, 1), pair("qwen3-moe").folder, lora)
    several, split = stepped(MeshShape(2, 2, 2), pair("qwen3-moe").folder, lora)
    np.testing.assert_allclose(several.loss, one.loss, rtol=1e-5)
    np.testing.assert_allclose(several.grad_norm, one.grad_norm, rtol=1e-5)
    for name in one.told:
        np.testing.assert_allclose(several.told[name], one.told[name], rtol=1e-5)
    found = jax.tree_util.tree_leaves_with_path(whole)
    assert any("expert_down" in jax.tree_util.keystr(path) and np.abs(leaf).max() > 1e-4 for path, leaf in found)
    for (path, leaf), other in zip(found, jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(other, leaf, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.torch
def test_adapters_of_experts_learn_and_are_merged(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base", "Qwen3Moe", head_dim=8, **EXPERTS)
    rows = trained(job_in(tmp_path, "{rank: 4, base: float32}"))
    assert rows[0]["loss"] - rows[-1]["loss"] > 0.2
    assert all(0 < row[ENTROPY] <= 1 <= row[LOAD] <= 8 and row[BALANCE] > 0 for row in rows)
    run = tmp_path / "runs" / "run"
    with pytest.raises(UserError) as raised:
        export(str(run), str(tmp_path / "peft"))
    assert raised.value.code == "E-WEIGHTS-032"
    assert "those of the trained state" in export(str(run), str(tmp_path / "merged"), merge=True).proof
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
        ("qwen3-30b-a3b", {"lora": {"base": "nf4"}}, "E-METHOD-044"),
    ],
)
def test_rejected_before_anything_is_compiled(model: str, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError) as raised:
        method_of(Job(model=Section(name=model, vocab=1000), data="unread", **changes), chunk=1)
    assert raised.value.code == code


@pytest.mark.parametrize("key", ["dora", "dropout"])
def test_dora_and_dropout_of_experts_are_rejected_and_those_of_the_attention_are_not(key: str) -> None:
    value = {"dora": True, "dropout": 0.1}[key]

    def specs(**lora: Any) -> Any:
        job = Job(model=Section(name="qwen3-30b-a3b", vocab=1000), data="unread", lora=lora)
        from forerun.models.registry import model_of

        return method_of(job, chunk=1).specs(model_of(job.model).specs())

    with pytest.raises(UserError) as raised:
        specs(**{key: value})
    assert raised.value.code == "E-METHOD-043"
    assert specs(**{key: value, "targets": ["q_proj"]}).blocks.query.down.shape == (48, 2048, 8)
    adapted = specs()
    assert adapted.blocks.expert_down.down.shape == (48, 128, 768, 8)
    assert not hasattr(adapted.blocks.router, "down")  # routers stay frozen
