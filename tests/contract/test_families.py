"""Every family against Hugging Face transformers (torch, float32, eager), on checkpoints that transformers wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import family_parity as parity
import jax
import numpy as np
import pytest
from families_reference import FAMILIES, TURNS, VARIANTS, VOCAB, chosen_variants, pair, params_of
from family_parity import LENGTH, ROWS
from safetensors.numpy import load_file

from forerun.config.schema import Job, Precision
from forerun.config.schema import Model as Section
from forerun.hardware.mesh import MeshShape
from forerun.hub.documents import read_json
from forerun.models.families.registry import read_config
from forerun.models.model_facts import model_for
from forerun.nn import sharding
from forerun.nn.compute import Compute
from forerun.program.build import build, make_mesh
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

# Together these families have each kind of layer, norm, position and head. CI compares the logits of all variants, and
# everything else of these families.
SAMPLE = {
    *("Llama 2, 3.x", "Qwen2, 2.5", "Qwen3", "Gemma 2", "Gemma 4 26B-A4B (text)", "Gemma 4 E2B, E4B (text)"),
    *("Phi-3, Phi-4-mini", "OLMo 2", "Granite 3, 4.1", "GLM-4", "Qwen3.5, 3.6, 3.8 (dense)", "Qwen3.5, 3.6 (experts)"),
    *("LFM2, LFM2.5", "Qwen3-MoE", "Mixtral", "MiniMax-M2", "gpt-oss", "GPT-2"),
}
Note = Callable[[str, str, Any], None]


def one_of_each_family(requirement: str) -> pytest.MarkDecorator:
    """Parametrize a test with the variants of a requirement. Families that are not in the sample are slow."""
    marks = {name: () if VARIANTS[name].row in SAMPLE else pytest.mark.slow for name in chosen_variants(requirement)}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def test_each_requirement_has_each_family_and_each_variant_has_a_requirement() -> None:
    chosen = {requirement: chosen_variants(requirement) for requirement in TURNS}
    assert {tuple(VARIANTS[name].row for name in names) for names in chosen.values()} == {tuple(FAMILIES)}
    assert {name for names in chosen.values() for name in names} == set(VARIANTS)
    assert {VARIANTS[name].row for name in VARIANTS} >= SAMPLE


def expected_logits(name: str) -> np.ndarray:
    return parity.expected_logits(pair(name))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.torch
def test_logits(name: str, families_table: Note) -> None:
    assert np.std(expected_logits(name)[parity.REAL]) > parity.SPREAD
    difference = parity.logits_difference(pair(name))
    assert difference < parity.LOGITS_LIMIT
    variant, config = VARIANTS[name], pair(name).model.config
    families_table(variant.row, "logits", difference)
    families_table(variant.row, "head", ["tied" if config.tied else "untied"])
    families_table(variant.row, "RoPE scaling", [variant.scaling])


@pytest.mark.torch
def test_ernie_is_not_llama() -> None:
    """Llama's reader understands every key of ERNIE's config.json, and its table every tensor. The logits are wrong."""
    one = pair("ernie")
    content = read_json(one.folder / "config.json") | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
    assert content.pop("use_bias")
    family, config = read_config(content, "config.json")
    model = model_for(config)
    params = params_of(load_file(one.folder / "model.safetensors"), family, model)
    got = jax.jit(lambda *arrays: model.apply(*arrays, Compute()).logits())(
        params, ROWS.tokens, ROWS.segments, ROWS.positions
    )
    assert np.abs(np.asarray(got) - expected_logits("ernie"))[ROWS.segments > 0].max() > 1.0


def expected_loss_and_gradients(name: str) -> tuple[float, Any]:
    return parity.expected_loss_and_gradients(pair(name))


@pytest.mark.parametrize("name", chosen_variants("packing"))
@pytest.mark.torch
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    assert parity.packing_difference(pair(name)) < parity.LOGITS_LIMIT


@one_of_each_family("gradients")
@pytest.mark.torch
def test_gradients_of_the_mean_loss(name: str, families_table: Note) -> None:
    expected_loss, expected = expected_loss_and_gradients(name)
    value, got = parity.loss_and_gradients(pair(name))
    np.testing.assert_allclose(value, expected_loss, rtol=1e-5)
    errors = parity.gradient_errors(expected, got)
    worst = max(errors.values())
    assert worst < parity.GRADIENTS_LIMIT, errors
    families_table(VARIANTS[name].row, "gradients", worst)


@one_of_each_family("cache")
@pytest.mark.torch
def test_the_cache_gives_the_same_logits(name: str) -> None:
    """Against the reference's logits, which have no cache."""
    assert parity.cache_difference(pair(name), expected_logits(name)) < parity.LOGITS_LIMIT


@pytest.mark.torch
@one_of_each_family("devices")
def test_a_step_on_eight_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and norm of all gradients are those of the reference, whose parameters lie in one place."""
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)  # these matrices count as large
    one, shape = pair(name), MeshShape(1, 4, 2)
    job = Job(
        model=Section(layers=1, embed=8, heads=1, vocab=VOCAB),  # not looked at: the model is given
        data="unread",
        sequence=LENGTH,
        batch=len(ROWS.tokens),
        steps=1,
        precision=Precision(compute="float32"),
    )
    resolved = ResolvedJob(job)
    vars(resolved.model_facts)["model"] = one.model  # replaces the value of the cached property
    program = build(resolved, make_mesh(shape, jax.devices()), derive(job, shape, None))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.state)
    state, batch = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf.reshape(like.shape), like.sharding),
        (replace(empty, params=one.params), ROWS),
        (program.state, program.batch),
    )
    blocks = state.params.blocks
    for stack in blocks.values() if isinstance(blocks, dict) else [blocks]:
        up = (stack.up or stack.expert_up).value
        split = (up.shape[1] // 4, *up.shape[2:-1], up.shape[-1] // 2)  # the experts, or the embedding
        assert up.sharding.shard_shape(up.shape)[1:] == split
    _, metrics = program.trace().lower().compile()(state, batch, program.placed_schedule())
    expected_loss, expected = expected_loss_and_gradients(name)
    np.testing.assert_allclose(metrics.loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, parity.norm_of(expected), rtol=1e-4)
