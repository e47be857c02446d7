"""The torus of a slice: wrap-around links, the place of each partition, and links that rings share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from jax.experimental import mesh_utils

from forerun.hardware.chips import device_kind_of
from forerun.hardware.slices import Slice, slice_named, slices
from forerun.planner.time.collectives.torus import RingPath, Torus

LARGEST = 512  # devices; larger slices follow the same rules and take longer


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("v5e-16", (False, False)),
        ("v6e-128", (False, True)),  # 8 x 16
        ("v5e-256", (True, True)),
        ("v4-64", (False, False, False)),  # 2x4x4
        ("v5p-128", (True, True, True)),
        ("v4:4x4x12", (True, True, True)),
        ("tpu7x-2x2x1", (False, False, False)),
    ],
)
def test_wrap_around_links(name: str, closed: tuple[bool, ...]) -> None:
    assert Torus.of(slice_named(name)).closed == closed


def fake_devices(on: Slice) -> list[SimpleNamespace]:
    x_side, y_side, z_side = (*on.shape, 1)[:3]
    return [
        SimpleNamespace(
            coords=(x, y, z), core_on_chip=core, platform="tpu", device_kind=device_kind_of(on.chip), process_index=0
        )
        for z in range(z_side)
        for y in range(y_side)
        for x in range(x_side)
        for core in range(on.chip.devices_per_chip)
    ]


@pytest.mark.parametrize("on", [one for one in slices() if one.devices <= LARGEST], ids=lambda one: one.name)
def test_partitions_are_where_jax_puts_them(on: Slice) -> None:
    devices, torus = fake_devices(on), Torus.of(on)
    for tp in (1, 2, 4, 8, 16):
        for data in (1, 2):
            if on.devices % (tp * data):
                continue
            mesh = (data, on.devices // tp // data, tp)
            grid = mesh_utils.create_device_mesh(mesh, devices=devices, allow_split_physical_axes=True)
            expected = tuple((*device.coords[: len(on.shape)], device.core_on_chip) for device in grid.flat)
            assert torus.places(mesh) == expected, mesh


def test_a_route_takes_the_shorter_way() -> None:
    ring, line = Torus((16,), (True,)), Torus((16,), (False,))
    assert list(ring.route((0, 0), (15, 0))) == [((0,), 0, -1)]
    assert len(list(line.route((0, 0), (15, 0)))) == 15
    assert len(list(ring.route((2, 0), (10, 0)))) == 8


@pytest.mark.parametrize(
    ("torus", "path"),
    [
        (Torus((4,), (True,)), RingPath(1, 4)),
        (Torus((4,), (False,)), RingPath(2, 6)),  # three links there, and three back
        (Torus((4, 4), (True, True)), RingPath(1, 20)),  # 12 links in rows, 4 x 2 between rows
        (Torus((4, 4), (False, False)), RingPath(2, 30)),  # 12, 3 x (3 + 1) between rows, 6 from the last to the first
        (Torus((4, 4), (False, False), orders_rings=True), RingPath(1, 16)),
        (Torus((2,), (False,), cores=2), RingPath(2, 2)),  # core to core needs no link
    ],
)
def test_rings_by_counting_links(torus: Torus, path: RingPath) -> None:
    assert torus.best_ring([torus.places((torus.devices,))]) == path
