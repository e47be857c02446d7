from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config import schema
from forerun.config.schema import Job, Model, Optimizer, Precision
from forerun.hardware.mesh import MeshShape
from forerun.program.build import Program, build, make_mesh
from forerun.program.guard import ARMED, Rule, Verdict, Watch, chosen, noted, released
from forerun.resolve.derive import derive
from forerun.resolve.resolved_job import ResolvedJob

TAKEN, NOT_FINITE, SPIKE, HALTED = Verdict


def watch(norms: list[float], window: int, halted: bool = False) -> Watch:
    """With these norms, noted one after the other."""
    seen = Rule(window=window).watch()
    for step, norm in enumerate(norms):
        seen = noted(seen, jnp.int32(step), jnp.float32(norm))
    return replace(seen, halted=jnp.asarray(halted))


def verdict(rule: Rule, seen: Watch, loss: float, norm: float) -> int:
    return int(rule.verdict(seen, jnp.float32(loss), jnp.float32(norm)))


def test_a_spike_is_beyond_the_median() -> None:
    """The oracle sorts; powers of two and whole factors keep every product exact."""
    draw = np.random.default_rng(1)
    found = set()
    for _ in range(60):
        window = int(draw.integers(1, 24))
        norms = (2.0 ** draw.integers(-3, 6, int(draw.integers(0, 40)))).tolist()
        norm, factor = float(2.0 ** draw.integers(-3, 10)), float(draw.integers(2, 20))
        last = sorted(norms[-window:])
        armed = len(last) >= min(ARMED, window)
        expected = SPIKE if armed and norm > factor * last[len(last) // 2] else TAKEN
        assert verdict(Rule(factor, window), watch(norms, window), 1.0, norm) == expected
        found.add((armed, expected))
    assert found == {(True, SPIKE), (True, TAKEN), (False, TAKEN)}


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
@pytest.mark.parametrize("spike", [30.0, None])
def test_what_is_not_finite_is_refused_from_the_first_step_on(loss: float, norm: float, spike: float | None) -> None:
    rule = Rule(spike)
    assert verdict(rule, rule.watch(), loss, norm) == NOT_FINITE
    assert verdict(rule, watch([1.0] * 70, 64), loss, norm) == NOT_FINITE
    assert verdict(rule, watch([1.0] * 70, 64, halted=True), loss, norm) == HALTED


def test_without_a_factor_nothing_is_a_spike() -> None:
    seen = watch([1.0] * 70, 64)
    assert verdict(Rule(None), seen, 1.0, 1e30) == TAKEN
    assert verdict(Rule(30.0), seen, 1.0, 31.0) == SPIKE
    assert verdict(Rule(30.0), seen, 1.0, 30.0) == TAKEN


def test_batches_in_which_nothing_counts_are_no_measure() -> None:
    seen = watch([1.0] * ARMED + [0.0] * 40, 64)
    assert verdict(Rule(30.0), seen, 1.0, 2.0) == TAKEN
    assert verdict(Rule(30.0), seen, 1.0, 31.0) == SPIKE
    assert verdict(Rule(30.0), seen, 1.0, 0.0) == TAKEN


def test_arrays_that_no_step_changes_cost_no_select() -> None:
    frozen, before, after = jnp.ones(3), jnp.zeros(2), jnp.ones(2)
    kept = chosen(jnp.int32(TAKEN), {"frozen": frozen, "x": after}, {"frozen": frozen, "x": before})
    assert kept["frozen"] is frozen
    assert kept["x"].tolist() == [1, 1]
    assert chosen(jnp.int32(SPIKE), {"x": after}, {"x": before})["x"].tolist() == [0, 0]


def built(**fields: Any) -> Program:
    given: dict[str, Any] = {
        "model": Model(layers=2, embed=16, heads=2, mlp=32, vocab=64),
        "data": "unread",
        "sequence": 8,
        "batch": 4,
        "steps": 10,
        "optimizer": Optimizer(ema=0.9),
    }
    job, shape = Job(**given | fields), MeshShape(1, 2, 2)
    mesh = make_mesh(shape, jax.devices()[:4])
    return build(ResolvedJob(job), mesh, derive(job, shape, None))


def bits(state: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def ones(program: Program, weight: float) -> Any:
    """A batch of ones, with this weight."""
    batch = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), program.batch)
    batch = replace(batch, weights=batch.weights * weight)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), batch, program.batch)


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
def test_a_refused_step_changes_no_bit_and_those_behind_it_do_nothing(params: Any) -> None:
    program = built(precision=Precision(params=params))
    executable, schedule = program.trace().lower().compile(), program.placed_schedule()

    def step(state: Any, batch: Any) -> Any:
        return executable(state, batch, schedule)

    healthy, poisoned = ones(program, 1.0), ones(program, math.nan)
    state, metrics = step(program.initial_state(0), healthy)
    assert int(metrics.verdict) == TAKEN
    norms = np.asarray(state.watch.norms)
    assert norms[0] == pytest.approx(float(metrics.grad_norm), rel=1e-2), "a bfloat16 norm is shown rounded"
    assert not norms[1:].any()

    before = bits(replace(state, watch=released(state.watch)))
    expected = bits(step(jax.tree.map(jnp.copy, state), healthy)[0])
    for batch, said in ((poisoned, NOT_FINITE), (healthy, HALTED), (poisoned, HALTED), (healthy, HALTED)):
        state, metrics = step(state, batch)
        assert int(metrics.verdict) == said
        assert bool(state.watch.halted)
        assert bits(replace(state, watch=released(state.watch))) == before

    state, metrics = step(replace(state, watch=released(state.watch)), healthy)
    assert int(metrics.verdict) == TAKEN
    assert bits(state) == expected


def test_the_rule_is_part_of_the_program() -> None:
    texts = [
        built(guard=guard).trace().lower().as_text()
        for guard in (schema.Guard(), schema.Guard(spike=None), schema.Guard(window=8), schema.Guard(skips=3))
    ]
    assert len(set(texts[:3])) == 3
    assert texts[3] == texts[0], "how many are left out is the host's business"
