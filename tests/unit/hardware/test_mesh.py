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


@pytest.mark.parametrize(
    ("wanted", "devices", "why", "fixes"),
    [
        ((1, 3, 2), 8, "number of devices", ["- mesh.data=1 mesh.fsdp=4 mesh.tp=2"]),
        ((3, -1, 1), 8, "number of devices", ["- mesh.data=4 mesh.fsdp=2 mesh.tp=1"]),
        ((2, 2, 2), 1, "v6e-1 is one chip with one device", ["- mesh.data=1 mesh.fsdp=1 mesh.tp=1"]),
        ((1, 8, 1), 4, "counts TensorCores", ["- mesh.data=1 mesh.fsdp=4 mesh.tp=1"]),
    ],
)
def test_impossible_mesh_names_the_nearest(
    wanted: tuple[int, int, int], devices: int, why: str, fixes: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        resolve(*wanted, devices)
    assert error.value.code == "E-HARDWARE-010"
    assert why in error.value.why
    _, *meshes = error.value.fix.splitlines()
    assert meshes[:1] == fixes
    assert len(meshes) == (1 if devices == 1 else 3)


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


@pytest.mark.parametrize(("wanted", "code"), [((-1, -1, 1), "006"), ((1, 1, 0), "005"), ((1, 1, -2), "005")])
def test_invalid_sizes(wanted: tuple[int, int, int], code: str) -> None:
    with pytest.raises(UserError, match=f"E-HARDWARE-{code}"):
        resolve(*wanted, 8)


def test_model_that_fits_the_mesh() -> None:
    check_model(MeshShape(2, 2, 2), heads=16, batch=32, micro_batch=4)
    check_model(MeshShape(2, 2, 2), heads=None, batch=32, micro_batch=None)


@pytest.mark.parametrize(
    ("mesh", "heads", "batch", "micro_batch", "code", "fix"),
    [
        (MeshShape(2, 4, 1), None, 30, None, "E-HARDWARE-007", "batch=24 or batch=32"),
        (MeshShape(1, 8, 1), None, 3, None, "E-HARDWARE-007", "batch=8"),
        (MeshShape(2, 2, 1), None, 32, 3, "E-HARDWARE-008", "micro_batch=2 or micro_batch=4, or batch=24"),
        (MeshShape(1, 8, 1), None, 32, 16, "E-HARDWARE-008", "micro_batch=4, or batch=128"),
        (MeshShape(1, 1, 4), 14, 8, None, "E-HARDWARE-009", "mesh.tp=2 or mesh.tp=7"),
    ],
)
def test_a_model_that_does_not_divide(
    mesh: MeshShape, heads: int | None, batch: int, micro_batch: int | None, code: str, fix: str
) -> None:
    with pytest.raises(UserError) as error:
        check_model(mesh, heads, batch, micro_batch)
    assert (error.value.code, error.value.fix) == (code, fix)
