from __future__ import annotations

from typing import Any

import pytest

from forerun.config.schema import Job, Model, Optimizer
from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape
from forerun.resolve.derive import derive


def job(**fields: Any) -> Job:
    return Job(
        **{"model": Model(name="qwen3-0.6b"), "data": "texts", "batch": 24, "sequence": 128, "steps": 200} | fields
    )


def test_effective_batch_is_the_product() -> None:
    derived = derive(job(micro_batch=3), MeshShape(2, 2, 2), examples=600)
    assert (derived.micro_batch, derived.accumulation, derived.mesh.data_parallel) == (3, 2, 4)
    assert derived.batch == 3 * 2 * 4
    assert derived.tokens_per_step == 24 * 128
    assert derived.steps_per_epoch == 25.0


@pytest.mark.parametrize("mesh", [MeshShape(1, 1, 1), MeshShape(8, 1, 1), MeshShape(1, 4, 2), MeshShape(1, 1, 8)])
def test_no_mesh_changes_batch_steps_or_warm_up(mesh: MeshShape) -> None:
    derived = derive(job(), mesh, None)
    assert (derived.batch, derived.tokens_per_step, derived.steps, derived.warmup_steps) == (24, 3072, 200, 6)
    assert derived.micro_batch * derived.accumulation * mesh.data_parallel == 24


@pytest.mark.parametrize(
    ("fields", "examples", "steps"),
    [({"steps": 7}, None, 7), ({"steps": None, "epochs": 2.5}, 49, 6), ({"steps": None}, 48, 2)],
)
def test_steps(fields: dict[str, Any], examples: int | None, steps: int) -> None:
    assert derive(job(**fields), MeshShape(1, 1, 1), examples).steps == steps


@pytest.mark.parametrize(("warmup", "expected"), [(0.0, 0), (0.03, 6), (0.5, 100), (1.0, 1), (40.0, 40), (900.0, 200)])
def test_warm_up_is_a_share_or_a_number(warmup: float, expected: int) -> None:
    assert derive(job(optimizer=Optimizer(warmup=warmup)), MeshShape(1, 1, 1), None).warmup_steps == expected


def test_rows_give_every_number_and_its_reason() -> None:
    rows = {name: (value, why) for name, value, why in derive(job(micro_batch=3), MeshShape(2, 2, 2), 600).rows()}
    assert rows["mesh"] == ("2x2x2", "data x fsdp x tp on 8 devices")
    assert rows["accumulation"] == ("2", "batch 24 / (micro_batch 3 x 4)")
    assert rows["effective batch"] == ("24", "micro_batch 3 x accumulation 2 x 4 data-parallel devices")
    assert rows["steps per epoch"] == ("25.0", "600 rows of 128 tokens / batch 24")
    assert rows["steps"] == ("200", "the job's")
    assert rows["warm-up steps"] == ("6", "3 % of 200 steps")
    unread = {name: (value, why) for name, value, why in derive(job(), MeshShape(1, 1, 1), None).rows()}
    assert unread["steps per epoch"] == ("unknown", "the data was not read")
    assert unread["effective batch"][1].endswith("1 data-parallel device")


def test_large_numbers_are_written_out() -> None:
    rows = {name: why for name, _, why in derive(job(steps=None), MeshShape(1, 1, 1), 1_234_567).rows()}
    assert rows["steps per epoch"] == "1234567 rows of 128 tokens / batch 24"


@pytest.mark.parametrize(
    ("fields", "mesh", "examples", "what", "fix"),
    [
        ({"batch": 20}, MeshShape(4, 2, 1), None, "batch=20 does not divide over 8", "batch=16 or batch=24"),
        ({"batch": 3}, MeshShape(1, 8, 1), None, "batch=3 does not divide over 8", "batch=8"),
        ({"micro_batch": 5}, MeshShape(2, 1, 1), None, "micro_batch=5 does not divide the 12", "micro_batch=4 or"),
        ({"steps": None}, MeshShape(1, 1, 1), None, "number of steps is not known", "set steps"),
    ],
)
def test_mistakes(fields: dict[str, Any], mesh: MeshShape, examples: int | None, what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        derive(job(**fields), mesh, examples)
    assert what in caught.value.what
    assert fix in caught.value.fix
