"""Every schedule at every step, against transformers and Optax; and the numbers are arguments of one program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from forerun.config.schema import Optimizer
from forerun.program.schedule import TIMESCALE, Schedule, rate_at

STEPS, WARMUP, LR = 60, 7, 0.02
NAMES = {
    "linear": "linear",
    "constant": "constant_with_warmup",
    "cosine": "cosine_with_min_lr",
    "wsd": "warmup_stable_decay",
    "inverse_sqrt": "inverse_sqrt",
    "polynomial": "polynomial",
    "cosine_restarts": "cosine_with_restarts",
}


def rates(steps: int = STEPS, warmup: int = WARMUP, **fields: Any) -> np.ndarray:
    o = Optimizer(lr=LR, **fields)
    schedule = Schedule.of(o, steps, warmup)
    return np.array([rate_at(o.schedule, schedule, np.int32(step), np) for step in range(steps + 3)])


def of_transformers(name: str, **more: Any) -> np.ndarray:
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    found = transformers.get_scheduler(name, optimizer, WARMUP, STEPS, scheduler_specific_kwargs=more)
    values = []
    for _ in range(STEPS + 3):
        values.append(found.get_last_lr()[0])
        optimizer.step()
        found.step()
    return np.array(values)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fields", "theirs"),
    [
        ({"schedule": "linear", "final_lr": 0.0}, {}),
        ({"schedule": "constant"}, {}),
        ({"schedule": "cosine", "final_lr": 0.1}, {"min_lr_rate": 0.1}),
        ({"schedule": "wsd", "decay": 0.25, "final_lr": 0.1},
         {"num_decay_steps": 15, "decay_type": "linear", "min_lr_ratio": 0.1}),
        ({"schedule": "wsd", "decay": 20, "final_lr": 0.0},
         {"num_decay_steps": 20, "decay_type": "linear", "min_lr_ratio": 0.0}),
        ({"schedule": "inverse_sqrt"}, {}),
        ({"schedule": "polynomial", "power": 3.0, "final_lr": 0.05}, {"power": 3.0, "lr_end": 0.05 * LR}),
        ({"schedule": "cosine_restarts", "cycles": 3, "final_lr": 0.0}, {"num_cycles": 3}),
    ],
)  # fmt: skip
def test_after_the_warm_up_it_is_the_schedule_of_transformers(fields: Any, theirs: Any) -> None:
    expected = of_transformers(NAMES[fields["schedule"]], **theirs)
    # A cosine of transformers rises again after the last step.
    last = STEPS + 1 if fields["schedule"] == "cosine" else STEPS + 3
    np.testing.assert_allclose(rates(**fields)[WARMUP:last], expected[WARMUP:last], rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("schedule", ["wsd", "inverse_sqrt", "polynomial", "cosine_restarts"])
def test_the_warm_up_is_that_of_the_other_schedules(schedule: str) -> None:
    np.testing.assert_array_equal(rates(schedule=schedule)[:WARMUP], rates(schedule="cosine")[:WARMUP])


def test_wsd_polynomial_and_restarts_are_those_of_optax() -> None:
    rest = STEPS - WARMUP
    poly = optax.polynomial_schedule(LR, 0.1 * LR, 2.5, rest)
    wsd = optax.join_schedules([optax.constant_schedule(LR), optax.linear_schedule(LR, 0.1 * LR, 12)], [rest - 12])
    for fields, theirs in (
        ({"schedule": "polynomial", "power": 2.5}, poly),
        ({"schedule": "wsd", "decay": 12.0}, wsd),
    ):
        expected = [float(theirs(step)) for step in range(rest + 3)]
        np.testing.assert_allclose(rates(**fields)[WARMUP:], expected, rtol=1e-5)
    cosine = optax.cosine_decay_schedule(LR, 20, alpha=0.1)
    restarts = [float(cosine(step % 20)) for step in range(60)]
    got = rates(steps=60, warmup=0, schedule="cosine_restarts", cycles=3)
    np.testing.assert_allclose(got[:60], restarts, rtol=1e-5)
    np.testing.assert_allclose(got[60:], 0.1 * LR, rtol=1e-6)


def test_inverse_sqrt_without_a_warm_up_has_the_time_scale_of_transformers() -> None:
    got = rates(steps=50, warmup=0, schedule="inverse_sqrt")
    np.testing.assert_allclose(got, LR / np.sqrt(1 + np.arange(53) / TIMESCALE), rtol=1e-6)


@pytest.mark.parametrize("schedule", NAMES)
def test_a_traced_schedule_has_the_same_rates(schedule: str) -> None:
    o = Optimizer(lr=LR, schedule=schedule)  # type: ignore[arg-type]
    values = jax.tree.map(jnp.asarray, Schedule.of(o, STEPS, WARMUP))
    traced = jax.jit(jax.vmap(lambda s, step: rate_at(schedule, s, step), (None, 0)))
    got = traced(values, jnp.arange(STEPS + 3))
    np.testing.assert_allclose(got, rates(schedule=schedule), rtol=1e-5, atol=1e-9)


def test_jobs_that_differ_in_numbers_have_arguments_of_one_kind() -> None:
    """A program is compiled for the structure and the dtypes of its arguments."""
    groups = ({"match": "a", "lr_scale": 0.5, "weight_decay": 0.1},)
    other = ({"match": "a", "lr_scale": 0.1, "weight_decay": 0.0},)
    for one, two in (
        ({"schedule": "wsd", "decay": 0.1}, {"schedule": "wsd", "decay": 30.0, "lr": 0.1}),
        ({"schedule": "polynomial"}, {"schedule": "polynomial", "power": 1.5}),
        ({"schedule": "cosine_restarts"}, {"schedule": "cosine_restarts", "cycles": 7}),
        ({"groups": groups}, {"groups": other}),
    ):
        made = [Schedule.of(Optimizer(**fields), STEPS, WARMUP) for fields in (one, two)]  # type: ignore[arg-type]
        kinds = [jax.tree.map(lambda x: x.dtype, schedule) for schedule in made]
        assert kinds[0] == kinds[1]


def test_an_extended_wsd_run_extends_the_stable_phase() -> None:
    short, long = rates(schedule="wsd", decay=10.0), rates(steps=90, schedule="wsd", decay=10.0)
    np.testing.assert_array_equal(short[:50], long[:50])  # until the decay of the shorter run, nothing changes
    np.testing.assert_array_equal(long[WARMUP:80], np.float32(LR))
    np.testing.assert_allclose(long[80:90], short[50:60], rtol=1e-6)


def test_a_decay_longer_than_the_run_leaves_no_stable_phase() -> None:
    np.testing.assert_array_equal(rates(schedule="wsd", decay=1000.0), rates(schedule="linear"))
