from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import Job, Model, Optimizer, Precision, Remat
from forerun.config.training_method import Lora
from forerun.hardware.mesh import MeshShape
from forerun.nn import sharding
from forerun.program.build import Program, build, make_mesh, program_hash
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

FOUR = MeshShape(1, 2, 2)


def built(shape: MeshShape = FOUR, **fields: Any) -> Program:
    given: dict[str, Any] = {
        "model": Model(layers=2, embed=16, heads=2, mlp=32, vocab=64),
        "data": "unread",
        "sequence": 8,
        "batch": 4,
        "steps": 10,
    }
    job = Job(**given | fields)
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    return build(ResolvedJob(job), mesh, derive(job, shape, None))


def hashed(**fields: Any) -> str:
    return program_hash(built(**fields).trace().lower())


def test_hash_is_of_the_program() -> None:
    base = hashed()
    assert base == hashed()
    assert len(base) == 12
    assert int(base, 16) >= 0
    assert base == hashed(name="other", seed=5, runs="elsewhere")  # nothing that the step knows of
    different = [
        hashed(sequence=16),
        hashed(batch=8),
        hashed(batch=8, micro_batch=2),
        hashed(optimizer=Optimizer(b1=0.8)),
        hashed(optimizer=Optimizer(schedule="linear")),
        hashed(remat=Remat(policy="none")),
        hashed(unroll=True),
        hashed(precision=Precision(compute="float32")),
        hashed(shape=MeshShape(2, 2, 1)),
    ]
    assert len({base, *different}) == 1 + len(different)


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 4000},
        {"optimizer": Optimizer(lr=1e-3)},
        {"optimizer": Optimizer(warmup=0)},
        {"optimizer": Optimizer(warmup=5, final_lr=0.0, weight_decay=0.0)},
    ],
    ids=str,
)
def test_schedule_values_are_no_part_of_the_program(fields: dict[str, Any]) -> None:
    """A sweep over them, and a longer run, compile nothing."""
    assert hashed(**fields) == hashed()


def test_nothing_is_made_by_building() -> None:
    before = jax.live_arrays()  # held, so that none of other tests goes meanwhile
    program = built(optimizer=Optimizer(ema=0.9))
    leaves = jax.tree.leaves((program.state, program.batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.mesh == program.mesh for leaf in leaves)
    assert len(jax.live_arrays()) == len(before)


def test_master_weights_are_float32_and_computing_is_bfloat16() -> None:
    program = built()
    assert {leaf.dtype for leaf in jax.tree.leaves(program.state.params)} == {jnp.dtype("float32")}
    dots = [eqn for eqn in all_equations(program.trace().jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(dots) > 20
    assert all("bfloat16" in {str(v.aval.dtype) for v in eqn.invars} for eqn in dots)
    exact = built(precision=Precision(compute="float32")).trace().jaxpr
    assert not [e for e in all_equations(exact) for v in e.outvars if str(getattr(v.aval, "dtype", "")) == "bfloat16"]


def all_equations(jaxpr: Any) -> list[Any]:
    found = list(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += all_equations(inner)
    return found


def test_moments_lie_where_their_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 64)
    state = built(optimizer=Optimizer(clip=1.0, ema=0.9)).state
    adam = state.optimizer[1][0]
    for tree in (adam.mu, adam.nu, state.average):
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(state.params), strict=True)
        assert all((a.shape, a.sharding) == (b.shape, b.sharding) for a, b in pairs)
    gate = state.params.blocks.gate.value
    assert gate.sharding.shard_shape(gate.shape) == (2, 8, 16)
    assert adam.count.sharding.is_fully_replicated


def test_state_is_donated() -> None:
    program = built()
    state = program.initial_state(0)
    batch = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), program.batch)
    after, _ = program.trace().lower().compile()(state, batch, program.placed_schedule())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert int(after.step) == 1


def test_the_seed_is_the_start() -> None:
    program = built()
    one, same, other = (np.asarray(program.initial_state(seed).params.embed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_flops_of_a_step() -> None:
    program = built(batch=8, micro_batch=1)
    assert program.flops_per_step == program.model.flops_per_token(8) * 8 * 8


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_step_keeps_every_dtype(params: str, micro_batch: int | None) -> None:
    """A state that comes out in other dtypes is another program in the second step, and twice the memory."""
    precision = Precision(params=params)  # type: ignore[arg-type]
    program = built(precision=precision, micro_batch=micro_batch, optimizer=Optimizer(ema=0.9))
    with jax.set_mesh(program.mesh):
        after, _ = jax.eval_shape(program.step, program.state, program.batch, program.schedule)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, program.state)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_batch_without_tokens_to_learn_changes_no_weight(micro_batch: int | None) -> None:
    """Its sums are 0 / 0; the loss and the gradient are 0 nevertheless, not NaN."""
    program = built(micro_batch=micro_batch, optimizer=Optimizer(weight_decay=0.0, warmup=0))
    batch = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), program.batch)
    batch = replace(batch, weights=jnp.zeros_like(batch.weights))
    before = jax.tree.map(np.asarray, program.initial_state(0).params)
    with jax.set_mesh(program.mesh):
        step = program.trace().lower().compile()
        after, metrics = step(program.initial_state(0), batch, program.placed_schedule())
    assert (float(metrics.loss), float(metrics.grad_norm)) == (0.0, 0.0)
    assert float(metrics.lr) > 0
    for have, want in zip(jax.tree.leaves(after.params), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_the_state_does_not_depend_on_unroll(lora: Lora | None) -> None:
    """A run resumes with another value of `unroll`, because its checkpoints are the same."""
    looped, unrolled = (built(unroll=unroll, lora=lora) for unroll in (False, True))
    assert jax.tree.structure(looped.state) == jax.tree.structure(unrolled.state)
    assert jax.tree.leaves(looped.state) == jax.tree.leaves(unrolled.state)
    with_loop, without = (program.trace().lower().as_text().count("stablehlo.while") for program in (looped, unrolled))
    assert without < with_loop
