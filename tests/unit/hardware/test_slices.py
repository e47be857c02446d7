from __future__ import annotations

from dataclasses import dataclass

import pytest

from forerun.errors import UserError
from forerun.hardware.chips import chip_named
from forerun.hardware.slices import slice_named, slice_of_devices, slices


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts", "topology"),
    [
        ("v2-8", 4, 8, 1, "v2:2x2"),
        ("v3-8", 4, 8, 1, "v3:2x2"),
        ("v3-32", 16, 32, 4, "v3:4x4"),
        ("v4-8", 4, 4, 1, "v4:2x2x1"),
        ("v5p-8", 4, 4, 1, "v5p:2x2x1"),
        ("v5p-2048", 1024, 1024, 256, "v5p:8x8x16"),
        ("v5e-1", 1, 1, 1, "v5e:1x1"),
        ("v5e-8", 8, 8, 1, "v5e:2x4"),
        ("v5e-16", 16, 16, 4, "v5e:4x4"),
        ("v6e-1", 1, 1, 1, "v6e:1x1"),
        ("v6e-256", 256, 256, 64, "v6e:16x16"),
        ("tpu7x-2x2x1", 4, 8, 1, "tpu7x:2x2x1"),
        ("tpu7x-4x4x4", 64, 128, 16, "tpu7x:4x4x4"),
    ],
)
def test_standard_slices(name: str, chips: int, devices: int, hosts: int, topology: str) -> None:
    found = slice_named(name)
    assert (found.chips, found.devices, found.hosts, found.topology) == (chips, devices, hosts, topology)
    assert found.name == name


def test_topology_options() -> None:
    assert slice_named("v6e-1").topology_options == {"chips_per_host_bounds": (1, 1, 1)}
    assert slice_named("v5e-4").topology_options == {"chips_per_host_bounds": (2, 2, 1)}
    assert slice_named("v5e-8").topology_options == {"chips_per_host_bounds": (2, 4, 1)}
    assert slice_named("v4-8").topology_options == {"chip_config_name": "megacore"}
    assert slice_named("v5p-8").topology_options == {}


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("v5litepod-8", "v5e-8"),
        ("V6E-8", "v6e-8"),
        ("trillium-8", "v6e-8"),
        ("v6e:2x4", "v6e-8"),
        ("v5p:8x8x16", "v5p-2048"),
        ("tpu7x:4x4x4", "tpu7x-4x4x4"),
    ],
)
def test_other_names_of_a_slice(name: str, same: str) -> None:
    assert slice_named(name) == slice_named(same)


def test_explicit_topology_beyond_the_standard_sizes() -> None:
    found = slice_named("v5p:16x16x24")
    assert (found.name, found.chips, found.hosts) == ("v5p:16x16x24", 6144, 1536)


@pytest.mark.parametrize(
    ("name", "why", "use"),
    [
        ("v4-4", "count TensorCores", "v4-8"),
        ("v5p-4", "count TensorCores", "v5p-8"),
        ("v3-16", "count TensorCores", "v3-32"),
        ("v6e-2", "count chips", "v6e-4"),
        ("v6e-512", "largest v6e slice is v6e-256", "v6e-256"),
        ("v6e-2x2", "topology of 4 chips", "v6e-4"),
        ("v6-8", "v6e only", "v6e-8"),
        ("v5-8", "v5e (16 GB) and v5p (95 GB)", "v5e-8"),
        ("tpu7x-8", "tpu7x-2x2x1 is 4 chips and 8 devices", "tpu7x-2x2x1"),
        ("v7-8", "called tpu7x", "tpu7x-2x2x1"),
        ("v5e:4x2", "standard shapes only", "v5e-8"),
        ("v5p:4x4x6", "every side is a multiple of 4", "v5p-256"),
        ("v5p:8x4x4", "smallest first: 4x4x8", "v5p-256"),
        ("v6e:2x2x2", "has 2 sides, 2x2x2 has 3", "v6e-8"),
        ("v5p:16x16x32", "at most 6144", "v5p-4096"),
    ],
)
def test_usual_confusions_are_explained(name: str, why: str, use: str) -> None:
    with pytest.raises(UserError) as error:
        slice_named(name)
    assert why in error.value.why
    assert use in error.value.fix
    assert "forerun hardware slices" in error.value.fix
    assert name in error.value.what


@pytest.mark.parametrize(
    ("name", "why"),
    [("v8i-8", "table is tpu7x"), ("v5p", "such as v5p-8"), ("", "known"), ("?", "known")],
)
def test_names_without_a_near_slice(name: str, why: str) -> None:
    with pytest.raises(UserError) as error:
        slice_named(name)
    assert why in error.value.why
    assert "forerun hardware slices" in error.value.fix


def test_every_listed_slice_is_found_by_its_name_and_its_topology() -> None:
    for entry in slices():
        assert slice_named(entry.name) is entry
        assert slice_named(entry.topology) is entry
        sides = 1
        for side in entry.shape:
            sides *= side
        assert entry.chips == sides


@dataclass(frozen=True)
class FakeDevice:
    coords: tuple[int, ...] | None
    process_index: int


@pytest.mark.parametrize(
    ("chip", "sides", "cores", "name"),
    [
        ("v5e", (2, 4, 1), 1, "v5e-8"),
        ("v5p", (2, 2, 4), 1, "v5p-32"),
        ("tpu7x", (2, 2, 1), 2, "tpu7x-2x2x1"),
        ("v6e", (1, 3, 1), 1, "v6e:1x3"),  # a part of a slice
    ],
)
def test_slice_of_running_tpu_devices(chip: str, sides: tuple[int, int, int], cores: int, name: str) -> None:
    boxes = [(x, y, z) for z in range(sides[2]) for y in range(sides[1]) for x in range(sides[0])]
    devices = [FakeDevice(coords, index // 4) for index, coords in enumerate(boxes) for _ in range(cores)]
    found = slice_of_devices(chip_named(chip), devices)
    assert (found.name, found.devices) == (name, len(devices))


def test_slice_of_running_gpus_and_of_devices_without_coordinates() -> None:
    gpus = [FakeDevice(None, index // 8) for index in range(16)]
    found = slice_of_devices(chip_named("h100"), gpus)
    assert (found.devices, found.hosts, found.devices_per_host) == (16, 2, 8)
    assert slice_of_devices(chip_named("v5e"), [FakeDevice(None, 0)] * 6).shape == (6, 1)
