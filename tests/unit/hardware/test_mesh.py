from __future__ import annotations

import itertools

import pytest

from forerun.errors import UserError
from forerun.hardware.mesh import MeshShape, check_model, resolve, valid_meshes


@pytest.mark.parametrize(
    ("wanted", "devices", "text"),
    [
        ((1, -1, 1), 8, "1x8x1"),
        ((2, 2, -1), 8, "2x2x2"),
        ((-1, 4, 1), 8, "2x4x1"),
        ((4, 64, 4), 1024, "4x64x4"),
        ((1, -1, 1), 1, "1x1x1"),
    ],
)
def test_resolved(wanted: tuple[int, int, int], devices: int, text: str) -> None:
    mesh = resolve(*wanted, devices)
    assert str(mesh) == text
    assert mesh.devices == devices


def test_data_parallel() -> None:
    assert MeshShape(2, 3, 4).data_parallel == 6


@pytest.mark.parametrize("devices", [1, 6, 8, 12])
def test_valid_meshes_are_all_and_only_the_factorisations(devices: int) -> None:
    sizes = range(1, devices + 1)
    expected = {triple for triple in itertools.product(sizes, repeat=3) if triple[0] * triple[1] * triple[2] == devices}
    found = [(mesh.data, mesh.fsdp, mesh.tp) for mesh in valid_meshes(devices)]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_impossible_mesh_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"1x3x2.*6.*v5e-8.*8.*E-HARDWARE-010") as error:
        resolve(1, 3, 2, 8, "v5e-8")
    _, first, *others = error.value.fix.splitlines()
    assert first == "- mesh.data=1 mesh.fsdp=4 mesh.tp=2"
    assert len(others) == 2


def test_a_rest_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"3x\?x1.*8.*3.*E-HARDWARE-010") as error:
        resolve(3, -1, 1, 8)
    assert error.value.fix.splitlines()[1] == "- mesh.data=4 mesh.fsdp=2 mesh.tp=1"


def test_every_proposed_mesh_resolves() -> None:
    for wanted in itertools.product((-1, 1, 3, 5, 16), repeat=3):
        if wanted.count(-1) > 1:
            continue
        try:
            resolve(*wanted, 12)
        except UserError as error:
            for line in error.fix.splitlines()[1:]:
                sizes = [int(word.split("=")[1]) for word in line.removeprefix("- ").split()]
                assert resolve(*sizes, 12).devices == 12


def test_eight_devices_of_a_v6e_1_are_a_known_mistake() -> None:
    with pytest.raises(UserError, match=r"8.*1.*E-HARDWARE-010") as error:
        resolve(2, 2, 2, 1)
    assert "v6e-1 is one chip with one device" in error.value.why
    assert error.value.fix == "use one of these:\n- mesh.data=1 mesh.fsdp=1 mesh.tp=1"


def test_eight_devices_of_a_v4_8_are_a_known_mistake() -> None:
    with pytest.raises(UserError) as error:
        resolve(1, 8, 1, 4)
    assert "counts TensorCores" in error.value.why


def test_two_open_axes() -> None:
    with pytest.raises(UserError, match=r"mesh\.data.*mesh\.fsdp.*-1.*E-HARDWARE-006"):
        resolve(-1, -1, 1, 8)


@pytest.mark.parametrize("size", [0, -2])
def test_sizes_that_are_none(size: int) -> None:
    with pytest.raises(UserError, match=f"mesh.tp={size} is not a number of devices"):
        resolve(1, 1, size, 8)


def test_model_that_fits_the_mesh() -> None:
    check_model(MeshShape(2, 2, 2), heads=16, batch=32, micro_batch=4)
    check_model(MeshShape(2, 2, 2), heads=None, batch=32, micro_batch=None)


def test_batch_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"batch=30.*8.*E-HARDWARE-007") as error:
        check_model(MeshShape(2, 4, 1), heads=None, batch=30, micro_batch=None)
    assert error.value.fix == "batch=24 or batch=32"


def test_batch_smaller_than_the_mesh() -> None:
    with pytest.raises(UserError) as error:
        check_model(MeshShape(1, 8, 1), heads=None, batch=3, micro_batch=None)
    assert error.value.fix == "batch=8"


def test_micro_batch_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"micro_batch=3.*8.*E-HARDWARE-008") as error:
        check_model(MeshShape(2, 2, 1), heads=None, batch=32, micro_batch=3)
    assert error.value.fix == "micro_batch=2 or micro_batch=4, or batch=24"


def test_micro_batch_larger_than_a_share() -> None:
    with pytest.raises(UserError) as error:
        check_model(MeshShape(1, 8, 1), heads=None, batch=32, micro_batch=16)
    assert error.value.fix == "micro_batch=4, or batch=128"


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(UserError, match=r"mesh\.tp=4.*14.*E-HARDWARE-009") as error:
        check_model(MeshShape(1, 1, 4), heads=14, batch=8, micro_batch=None)
    assert error.value.fix == "mesh.tp=2 or mesh.tp=7"
