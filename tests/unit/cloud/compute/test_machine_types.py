"""Machine types of slices. The expected values are those of Google's pages on TPU and GPU machines."""

import pytest

from forerun.cloud.compute.machine_types import is_machine_type, machine_shape, planned_name, rented_name
from forerun.errors import UserError


@pytest.mark.parametrize(
    ("slice", "machine", "hosts", "topology"),
    [
        ("v6e-1", "ct6e-standard-1t", 1, None),
        ("v6e-4", "ct6e-standard-4t", 1, None),
        ("v6e-8", "ct6e-standard-8t", 1, None),
        ("v6e-16", "ct6e-standard-4t", 4, "4x4"),
        ("v6e-256", "ct6e-standard-4t", 64, "16x16"),
        ("v5p-8", "ct5p-hightpu-4t", 1, None),
        ("v5p-32", "ct5p-hightpu-4t", 4, "2x2x4"),
        ("tpu7x-2x2x1", "tpu7x-standard-4t", 1, None),
        ("tpu7x-4x4x4", "tpu7x-standard-4t", 16, "4x4x4"),
        ("a3-highgpu-8g", "a3-highgpu-8g", 1, None),
        ("h100-8", "a3-highgpu-8g", 1, None),
        ("l4-2", "g2-standard-24", 1, None),
        ("e2-small", "e2-small", 1, None),
    ],
)
def test_machines_of_a_slice(slice: str, machine: str, hosts: int, topology: str | None) -> None:
    shape = machine_shape(slice)
    assert (shape.machine_type, shape.hosts, shape.topology) == (machine, hosts, topology)


@pytest.mark.parametrize(
    ("machine", "chip", "chips"),
    [
        ("a3-highgpu-8g", "H100", 8),
        ("a3-highgpu-1g", "H100", 1),
        ("a2-highgpu-1g", "A100-40", 1),
        ("a2-megagpu-16g", "A100-40", 16),
        ("a2-ultragpu-8g", "A100-80", 8),
        ("g2-standard-12", "L4", 1),
        ("g2-standard-24", "L4", 2),
        ("g2-standard-96", "L4", 8),
        ("a3-ultragpu-8g", "H200", 8),
        ("a4-highgpu-8g", "B200", 8),
        ("v6e-16", "v6e", 16),
        ("e2-small", "", 0),
    ],
)
def test_accelerators_of_a_machine(machine: str, chip: str, chips: int) -> None:
    shape = machine_shape(machine)
    assert (shape.chip, shape.chips) == (chip, chips)


def test_images_by_generation() -> None:
    assert machine_shape("v6e-8").image.endswith("/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e")
    assert machine_shape("tpu7x-2x2x1").image.endswith("/ubuntu-accel-2404-amd64-tpu-tpu7x")
    assert "nvidia" in machine_shape("a3-highgpu-8g").image
    assert not machine_shape("e2-small").image.count("accelerator")


@pytest.mark.parametrize("name", ["v5e-8", "v4-8", "g2-standard-5", "a2-tinygpu-1g", "4090-1", "h200-4", "h100-8x2"])
def test_machines_that_compute_engine_does_not_have(name: str) -> None:
    with pytest.raises(UserError) as caught:
        machine_shape(name)
    assert caught.value.code == "E-CLOUD-020"


def test_names_of_slices_are_no_machine_types() -> None:
    assert is_machine_type("g2-standard-48")
    assert is_machine_type("e2-small")
    assert not is_machine_type("v6e-8")
    assert not is_machine_type("tpu7x-2x2x1")


@pytest.mark.parametrize(
    ("machine", "planned"),
    [
        ("a3-highgpu-8g", "h100-8"),
        ("a3-megagpu-8g", "h100-8"),
        ("a3-ultragpu-8g", "h200-8"),
        ("a2-highgpu-2g", "a100-40-2"),
        ("a2-ultragpu-1g", "a100-80-1"),
        ("g2-standard-48", "l4-4"),
        ("a2-megagpu-16g", None),
        ("e2-small", None),
    ],
)
def test_the_slice_that_is_planned_for_a_machine_type(machine: str, planned: str | None) -> None:
    assert planned_name(machine) == planned
    assert rented_name(machine) == machine


def test_machines_by_the_names_of_slices() -> None:
    for name in ("h100-1", "h100-8", "a100-40-4", "a100-80-8", "h200-8", "b200-8", "l4-1", "l4-8"):
        assert planned_name(rented_name(name)) == name
    assert rented_name("v6e-8") == "v6e-8"
