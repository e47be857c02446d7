"""Steps with products of 8 bits: on one and on many devices, again from a stored state, and with adapters."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_assertions import assert_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.program.build import Program, program_hash, program_of
from forerun.program.state import State
from forerun.resolve.resolved_job import ResolvedJob

ROWS, LENGTH, VOCAB = 8, 16, 64
ONE = MeshShape(1, 1, 1)
LAYER_MATRICES = {"query", "key", "value", "out", "gate", "up", "down"}


def program(shape: MeshShape = ONE, **fields: Any) -> Program:
    given: dict[str, Any] = {
        "model": {"layers": 2, "embed": 256, "heads": 4, "mlp": 256, "vocab": VOCAB},
        "data": "unread",
        "sequence": LENGTH,
        "batch": ROWS,
        "steps": 4,
        "optimizer": {"lr": 1e-3, "clip": None},
        "precision": {"compute": "float32", "matmul": "int8"},
    }
    return program_of(ResolvedJob(Job.model_validate(given | fields)), shape, jax.devices()[: shape.devices])


def batch_of(made: Program, step: int) -> Any:
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, VOCAB, (ROWS, LENGTH))
    ones = np.ones((ROWS, LENGTH))
    arrays = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "weights": ones,
        "segments": ones,
        "positions": np.tile(np.arange(LENGTH), (ROWS, 1)),
    }
    placed = {
        name: jax.device_put(x.reshape(like.shape).astype(like.dtype), like.sharding)
        for name, x in arrays.items()
        for like in [getattr(made.batch, name)]
    }
    return replace(made.batch, **placed)


def continued(made: Program, compiled: Any, state: State, steps: range) -> tuple[State, list[float]]:
    losses = []
    with jax.set_mesh(made.mesh):
        for step in steps:
            state, metrics = compiled(state, batch_of(made, step), made.placed_schedule())
            losses.append(float(metrics.loss))
    return state, losses


def trained(shape: MeshShape = ONE, steps: int = 3, **fields: Any) -> tuple[Program, State, list[float]]:
    made = program(shape, **fields)
    compiled = made.trace().lower().compile()
    return made, *continued(made, compiled, made.initial_state(0), range(steps))


@pytest.fixture(scope="module")
def one_device() -> tuple[Program, State, list[float]]:
    return trained()


@pytest.mark.parametrize(
    ("shape", "micro_batch"),
    [
        (MeshShape(1, 8, 1), 1),
        *(
            pytest.param(shape, micro_batch, marks=pytest.mark.slow)
            for shape, micro_batch in (
                (MeshShape(1, 2, 2), 2),
                (MeshShape(1, 2, 1, slices=2), 2),
                (MeshShape(1, 2, 1, context=2), 4),
            )
        ),
    ],
)
def test_losses_are_those_of_one_device(shape: MeshShape, micro_batch: int, one_device: Any) -> None:
    _, _, losses = trained(shape, micro_batch=micro_batch)
    assert losses[0] == pytest.approx(one_device[2][0], rel=1e-5), "the forward pass has the same codes"
    np.testing.assert_allclose(losses, one_device[2], rtol=2e-3)


def test_the_loss_follows_that_of_floats_and_differs(one_device: Any) -> None:
    _, _, floats = trained(precision={"compute": "float32"})
    assert floats != one_device[2]
    np.testing.assert_allclose(one_device[2], floats, rtol=2e-3)


def test_a_stored_state_continues_bit_for_bit(one_device: Any) -> None:
    made = one_device[0]
    compiled = made.trace().lower().compile()
    state, _ = continued(made, compiled, made.initial_state(0), range(2))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, made.state)
    stored = jax.tree.map(jax.device_get, state)
    state, losses = continued(made, compiled, jax.tree.map(jax.device_put, stored, shardings), range(2, 3))
    assert losses == one_device[2][2:]
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(one_device[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_checkpoints_do_not_depend_on_it() -> None:
    with_codes, without = program(), program(precision={"compute": "float32"})
    assert jax.tree.structure(with_codes.state) == jax.tree.structure(without.state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(with_codes.state)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(without.state)
    ]
    assert program_hash(with_codes.trace().lower()) != program_hash(without.trace().lower())


def test_the_matrices_of_layers_have_codes_and_nothing_else() -> None:
    found = program().eight_bits
    assert found is not None
    assert {name.split(".")[-1] for name in found.matrices} == LAYER_MATRICES
    assert {name.split(".")[1] for name in found.matrices} == {"blocks"}
    assert found.matrices[".blocks.out"].inputs == 2
    assert program(precision={}).eight_bits is None


@pytest.mark.parametrize("unroll", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_codes_are_gathered_and_the_weights_are_not(unroll: bool) -> None:
    text = program(MeshShape(1, 8, 1), micro_batch=1, unroll=unroll).trace().lower().compile().as_text()
    gathered = re.findall(r"(\w+)\[([\d,]+)\]\S* all-gather\(", text)
    size = 256 * 256  # of every matrix of a layer
    found = [dtype for dtype, dims in gathered if np.prod([int(n) for n in dims.split(",")]) == size]
    assert len(found) >= 2 * len(LAYER_MATRICES), "for the forward pass and for the gradient of the activations"
    assert set(found) == {"s8"}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_operands_have_eight_bits_on_a_device_that_multiplies_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass, the backward pass and the layer that is computed again have 7 products each."""
    from forerun.methods import requirements

    plain = requirements.Numerics
    monkeypatch.setattr(requirements, "Numerics", lambda kind, floats: plain(kind))
    text = str(program(precision={"compute": "float32", "matmul": kind}, remat="none").trace().jaxpr)
    dots = [line for line in text.splitlines() if "dot_general[" in line or "preferred_element_type" in line]
    wanted = {"int8": "preferred_element_type=int32", "fp8": "f8_e"}[kind]
    assert sum(wanted in line for line in dots) >= (21 if kind == "int8" else 0)
    assert ("i8[" if kind == "int8" else "f8_e4m3fn[") in text
    assert ("f8_e5m2[" in text) == (kind == "fp8")


@pytest.mark.parametrize("policy", ["dots", *(pytest.param(one, marks=pytest.mark.slow) for one in ("none", "full"))])
def test_no_remat_policy_changes_the_loss(policy: str, one_device: Any) -> None:
    np.testing.assert_allclose(trained(remat=policy)[2], one_device[2], rtol=1e-4)


def test_adapters_learn_on_a_base_with_codes() -> None:
    lora = {"rank": 4, "base": "float32"}
    _, state, losses = trained(lora=lora, steps=2)
    _, _, floats = trained(lora=lora, precision={"compute": "float32"}, steps=2)
    np.testing.assert_allclose(losses, floats, rtol=2e-3)
    assert losses != floats
    assert any(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(state.params.blocks.query.up))


def test_too_many_tokens_on_a_device_are_rejected() -> None:
    with pytest.raises(UserError) as caught:
        program(sequence=1 << 17, batch=2)
    assert_error(caught.value, "E-METHOD-124", what="262144", fix="micro_batch")
