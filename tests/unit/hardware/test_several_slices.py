"""Names, sizes and prices of several slices, and the mesh on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.mesh import MeshShape, check_model, resolve, slices_of
from forerun.hardware.slices import slice_count, slice_named, slice_of_devices
from forerun.planner.compile.request import CompileRequest
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.search.space import meshes
from forerun.resolve.resolved_job import ResolvedJob


def test_a_number_in_front_counts_slices() -> None:
    one, four = slice_named("v5e-256"), slice_named("4xv5litepod-256")
    assert (four.name, four.slices, four.chips, four.devices, four.hosts) == ("4xv5e-256", 4, 1024, 1024, 256)
    assert (four.topology, four.shape) == (one.topology, one.shape)
    assert four.topology_options == {**one.topology_options, "num_slices": 4}
    assert four.devices_per_host == one.devices_per_host == 4
    assert slice_named("1xv5e-8") == slice_named("v5e-8")


def test_prices_are_per_chip_of_all_slices() -> None:
    one, two = slice_named("v5e-8"), slice_named("2xv5e-8")
    price = Tariff().price_of(two)
    assert price == Tariff().price_of(one)
    assert two.chips == 2 * one.chips


@pytest.mark.parametrize("name", ["0xv5e-8", "1000xv5e-8", "2xh100-8"])
def test_numbers_that_are_not_possible(name: str) -> None:
    with pytest.raises(UserError) as caught:
        slice_named(name)
    assert_error(caught.value, "E-HARDWARE-029")


def devices(slices: int) -> list[Any]:
    return [
        SimpleNamespace(coords=(x, y, 0), process_index=index, slice_index=index)
        for index in range(slices)
        for y in range(4)
        for x in range(2)
    ]


def test_slices_of_devices() -> None:
    assert slice_of_devices(chip_named("v5e"), devices(3)) == slice_named("3xv5e-8")
    assert (slice_count(devices(3)), slice_count([SimpleNamespace()])) == (3, 1)


def test_each_slice_has_the_mesh() -> None:
    shape = resolve(1, -1, 2, 32, slices=4)
    assert shape == MeshShape(1, 4, 2, slices=4)
    assert (shape.devices, shape.data_parallel, str(shape)) == (32, 16, "4x(1x4x2)")
    assert resolve(1, -1, 1, 8) == MeshShape(1, 8, 1)
    assert all(mesh.devices == 32 and mesh.slices == 4 for mesh in meshes(8, 32, 4))
    with pytest.raises(UserError) as caught:
        check_model(shape, 8, 24, None)
    assert_error(caught.value, "E-HARDWARE-007")
    with pytest.raises(UserError) as caught:
        resolve(1, -1, 1, 8, slices=3)
    assert_error(caught.value, "E-HARDWARE-028")


@pytest.mark.parametrize(
    ("wanted", "present", "platform", "used", "expected"),
    [
        (None, 1, "tpu", 4, 1),
        (1, 1, "gpu", 4, 1),
        (None, 2, "tpu", None, 2),
        (2, 2, "tpu", None, 2),
        (2, 1, "cpu", 8, 2),
        (1, 2, "tpu", None, "E-HARDWARE-026"),
        (2, 1, "tpu", None, "E-HARDWARE-026"),
        (2, 1, "gpu", None, "E-HARDWARE-025"),
        (2, 2, "tpu", 8, "E-HARDWARE-027"),
    ],
)
def test_the_slices_of_a_run(
    wanted: int | None, present: int, platform: str, used: int | None, expected: int | str
) -> None:
    if isinstance(expected, int):
        assert slices_of(wanted, present, platform, used, "here") == expected
        return
    with pytest.raises(UserError) as caught:
        slices_of(wanted, present, platform, used, "here")
    assert_error(caught.value, expected)


def question(on: str, recording: bool = False, **mesh: Any) -> CompileRequest:
    model = {"layers": 2, "embed": 64, "heads": 2, "vocab": 256}
    job = {"model": model, "data": "nothing", "steps": 1, "batch": 32, "mesh": mesh}
    return CompileRequest(ResolvedJob(Job.model_validate(job)), slice_named(on), recording)


def test_a_plan_takes_the_slices_of_the_place() -> None:
    assert question("2xv5e-8").derived().mesh == MeshShape(1, 8, 1, slices=2)
    assert question("2xv5e-8").derived().micro_batch == 2
    assert question("2xv5e-8", slices=2, data=2).mesh_shape() == MeshShape(2, 4, 1, slices=2)
    with pytest.raises(UserError) as caught:
        question("v5e-8", slices=2).derived()
    assert_error(caught.value, "E-HARDWARE-026")
    with pytest.raises(UserError) as caught:
        question("2xv5e-8", recording=True).mesh_shape()
    assert_error(caught.value, "E-HARDWARE-030")
