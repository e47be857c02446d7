"""Context parallelism: sequences split over 2 and 4 virtual devices, against the same computation on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import raises_error
from test_equalities import ONE, VOCAB, assert_near, built, packed, params_of, run

from forerun.config.schema import Job, Model, Remat
from forerun.hardware.mesh import MeshShape
from forerun.models.base import require_split_sequences
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.families.registry import read_config
from forerun.nn import sharding
from forerun.nn.compute import Compute
from forerun.nn.context import SequenceSplit
from forerun.nn.sharding import by_hand
from forerun.objectives.next_token import NextToken
from forerun.objectives.pairs import PAIRS, REFERENCE, max_pairs
from forerun.objectives.preference import Preference
from forerun.program.build import make_mesh, program_of
from forerun.resolve.resolved_job import ResolvedJob

TINY = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "sliding_window": 7,
    "query_pre_attn_scalar": 8,
}
TINY_MODEL = Model(layers=1, embed=32, heads=8, kv_heads=2, head_dim=8, mlp=64, vocab=VOCAB)
FAMILIES = {
    "gemma2": TINY | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": TINY | {"sliding_window_pattern": 2},
}


@pytest.fixture(autouse=True)
def _split_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)


def test_chunks_are_where_their_work_is_equal() -> None:
    """Two chunks of two positions for each of four devices, which are chunks 0 and 7, 1 and 6, and so on."""
    mesh, split = make_mesh(MeshShape(1, 1, 1, context=4), jax.devices()[:4]), SequenceSplit(4)
    text = jnp.arange(16, dtype=jnp.int32)[None]
    with jax.set_mesh(mesh):
        spread = jax.jit(split.spread)(text)
        np.testing.assert_array_equal(jax.jit(split.in_text_order)(spread), text)
        rule = jax.sharding.PartitionSpec(None, "context")
        starts = jax.jit(
            by_hand(lambda x: split.block_starts(2, 2)[None] + 0 * x[:, :2], arguments=(rule,), results=rule)
        )(spread)
    assert np.asarray(spread).reshape(4, 4).tolist() == [[2 * n, 2 * n + 1, 14 - 2 * n, 15 - 2 * n] for n in range(4)]
    np.testing.assert_array_equal(starts[0], np.asarray(spread)[0, ::2])


@pytest.mark.parametrize(
    ("family", "shape", "rows"),
    [("gemma2", MeshShape(1, 1, 1, context=4), 1), ("gemma3_text", MeshShape(1, 2, 2, context=2), 2)],
    ids=["gemma2", "gemma3"],
)
def test_loss_and_gradients_are_those_of_one_device(family: str, shape: MeshShape, rows: int) -> None:
    """Packed documents, windows, soft caps, grouped heads, and layers with two sets of positions."""
    config = read_config({"model_type": family, **FAMILIES[family]}, "a test")[1]
    assert isinstance(config, DecoderConfig)
    assert any(kind.window for kind in config.all_kinds)
    model = Decoder(config)
    params, batch = params_of(model), jax.tree.map(jnp.asarray, packed(rows, 48))

    def loss(params: Any) -> jax.Array:
        return NextToken(chunk=10)(model, params, batch, Compute(remat=Remat(policy="full"))).loss

    wanted, wanted_gradient = jax.jit(jax.value_and_grad(loss))(params)
    with jax.set_mesh(make_mesh(shape, jax.devices()[: shape.devices])):
        found, gradient = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert_near(gradient, wanted_gradient, 1e-5)


def test_preferences_are_those_of_one_device() -> None:
    """Pairs whose answers are on several devices: the values of a pair are summed over the context axis."""
    model = Decoder(DecoderConfig(layers=1, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=16, vocab=VOCAB))
    params, batch = params_of(model), packed(1, 48, 1)
    side = np.where(batch.segments % 2, 1, -1) * ((batch.segments + 1) // 2)  # documents 1 and 2 are the first pair
    reference = np.zeros((1, max_pairs(48), 2), np.float32)
    batch = jax.tree.map(jnp.asarray, replace(batch, extras={PAIRS: side.astype(np.int32), REFERENCE: reference}))

    def loss(params: Any) -> jax.Array:
        return Preference(chunk=10, loss="ipo")(model, params, batch, Compute()).loss

    wanted, wanted_gradient = jax.jit(jax.value_and_grad(loss))(params)
    with jax.set_mesh(make_mesh(MeshShape(1, 1, 1, context=4), jax.devices()[:4])):
        found, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert wanted > 0
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert_near(gradient, wanted_gradient, 1e-5)


def test_split_program_is_single_device() -> None:
    """With accumulation: losses and updated weights of two steps. The context axis splits weights as fsdp does."""
    batches = [packed(8, 32, seed) for seed in range(2)]
    small = {"batch": 8, "model": TINY_MODEL}
    states, expected = run(built(ONE, **small), batches)
    program = built(MeshShape(1, 2, 2, context=2), micro_batch=2, **small)
    gate = program.state.params.blocks.gate.value
    assert gate.sharding.shard_shape(gate.shape) == (1, 8, 32)
    tokens = program.batch.tokens
    assert tokens.sharding.shard_shape(tokens.shape) == (2, 2, 16)
    split_states, metrics = run(program, batches)
    np.testing.assert_allclose([m.loss for m in metrics], [m.loss for m in expected], rtol=1e-5)
    assert_near(split_states[-1].params, states[-1].params, 1e-5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"sequence": 36}, "E-HARDWARE-040"), ({"model": Model(name="qwen3.5-0.8b")}, "E-MODEL-050")],
    ids=["odd chunks", "recurrent layers"],
)
def test_what_cannot_be_split_is_rejected_before_compilation(changes: dict[str, Any], code: str) -> None:
    fields: dict[str, Any] = {"model": TINY_MODEL, "data": "unread", "sequence": 32, "batch": 1}
    resolved = ResolvedJob(Job(**{**fields, "steps": 1, **changes}))
    with raises_error(code):
        program_of(resolved, MeshShape(1, 1, 1, context=8), jax.devices()[:8])


def test_a_custom_class_must_declare_that_it_splits_sequences() -> None:
    class Own:
        vocab, heads = 8, None

    with raises_error("E-MODEL-050"):
        require_split_sequences(Own(), 2)  # type: ignore[arg-type]
    require_split_sequences(Own(), 1)  # type: ignore[arg-type]
