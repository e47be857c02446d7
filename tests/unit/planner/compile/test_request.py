"""What can be said before any compiler starts."""

from __future__ import annotations

import pytest
from error_assertions import raises_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.slices import slice_named
from forerun.planner.compile.request import Impossible, from_json, requests_of, slices_named
from forerun.planner.cost.job_cost import teacher_request
from forerun.resolve.resolved_job import ResolvedJob


def job(**values: object) -> ResolvedJob:
    return ResolvedJob(
        Job.model_validate({"model": "qwen3-0.6b", "data": "nothing", "batch": 32, "steps": 5, **values})
    )


def test_round_trip() -> None:
    [question] = requests_of(
        job(mesh={"tp": 2}, remat={"policy": "named", "offload": ["layer_in"]}), slices_named(["v5e-8"])
    )
    assert from_json(question.to_json()) == question
    assert "\n" not in question.to_json()


def test_slices_under_two_names_are_one() -> None:
    with raises_error("E-PLAN-012", "v5e-8") as raised:
        slices_named(["v6e-1", "v5e-8", "v5litepod-8", "v6e-1"])
    assert raised.value.fix == "--on v6e-1,v5e-8"
    assert "v5e-8 and v5litepod-8" in raised.value.why


def test_unknown_slice() -> None:
    with pytest.raises(UserError, match="'v5e-7'"):
        slices_named(["v5e-8", "v5e-7"])


@pytest.mark.parametrize(
    ("values", "slice", "code"),
    [
        ({"batch": 4}, "v5e-8", "E-HARDWARE-007"),
        ({"mesh": {"fsdp": 1, "tp": 2}}, "v6e-1", "E-HARDWARE-010"),
        ({"mesh": {"tp": 32}}, "v5e-64", "E-HARDWARE-009"),
        ({"micro_batch": 3}, "v5e-8", "E-HARDWARE-008"),
    ],
)
def test_impossible_layouts_name_the_slice_and_keep_their_code(
    values: dict[str, object], slice: str, code: str
) -> None:
    with pytest.raises(UserError) as raised:
        requests_of(job(**values), slices_named([slice]))
    assert raised.value.code == code
    assert raised.value.what.startswith(f"{slice}: ")


def test_an_error_of_the_compiler_keeps_its_code() -> None:
    """`plan` without --search raises it if the job runs on none of the slices."""
    error = UserError("E-PLAN-007", "v6e-1: the model does not run", why="it raised", fix="repair it")
    raised = Impossible(slice_named("v6e-1"), error).raised()
    assert (raised.code, raised.what) == ("E-PLAN-007", "v6e-1: the model does not run")


def test_the_mesh_has_as_many_devices_as_the_job_asks_for() -> None:
    [question] = requests_of(job(devices=1, batch=8), slices_named(["v3-8"]))
    assert str(question.mesh_shape()) == "1x1x1"
    assert question.derived().micro_batch == 8
    assert (question.devices, question.slice.devices) == (1, 8)
    assert "1 of 8" in question.idle_text()
    assert "7 are idle" in question.idle_text()
    [all_used] = requests_of(job(batch=8), slices_named(["v3-8"]))
    assert str(all_used.mesh_shape()) == "1x8x1"
    assert all_used.idle_text() == ""


def test_more_devices_than_the_slice_has() -> None:
    with raises_error("E-HARDWARE-017", "devices=16", "v5e-8"):
        requests_of(job(devices=16), slices_named(["v5e-8"]))


@pytest.mark.parametrize(("devices", "hosts"), [(None, 4), (1, 1), (4, 1), (5, 2), (16, 4)])
def test_only_hosts_with_used_devices_write(devices: int | None, hosts: int) -> None:
    [question] = requests_of(job(devices=devices, batch=80), slices_named(["v5e-16"]))
    assert question.hosts == hosts


def test_the_recording_of_a_teacher_uses_the_same_devices() -> None:
    question = teacher_request(job(devices=2, batch=8), slice_named("v3-8"))
    assert (question.job.batch, question.job.micro_batch) == (8, 4)
    assert question.mesh_shape().devices == 2
