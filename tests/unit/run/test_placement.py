"""Rows of a batch and the devices of a host, against plain slicing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.objectives.batch import Batch
from forerun.run.open_data import Placement

SHAPE = (2, 8, 4)


def like(mesh: Mesh) -> Batch[jax.ShapeDtypeStruct]:
    where = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"), None))
    leaf = jax.ShapeDtypeStruct(SHAPE, np.int32, sharding=where)
    return Batch(leaf, leaf, leaf, leaf, leaf)


def mesh_of(sizes: tuple[int, int, int], order: list[int]) -> Mesh:
    devices = np.array(jax.devices()[:8], dtype=object)[order]
    return Mesh(devices.reshape(sizes), ("data", "fsdp", "tp"))


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_one_host_holds_all_rows_and_places_them_where_they_belong(sizes: tuple[int, int, int]) -> None:
    place = Placement(like(mesh_of(sizes, [3, 1, 2, 0, 7, 5, 6, 4])))
    assert place.held.tolist() == list(range(8))
    rows = np.arange(64, dtype=np.int32).reshape(SHAPE)
    placed = place(Batch(rows, rows + 1, rows, rows, rows))
    np.testing.assert_array_equal(placed.tokens, rows)
    np.testing.assert_array_equal(placed.targets, rows + 1)


def test_a_host_whose_devices_are_not_neighbours_in_the_mesh_gives_its_own_rows(monkeypatch: Any) -> None:
    """Of the eight devices, numbers 0 and 5 stand for one host's; they come third and last in the mesh."""
    spec = like(mesh_of((8, 1, 1), [1, 2, 0, 3, 4, 6, 7, 5]))
    everywhere = spec.tokens.sharding.devices_indices_map(SHAPE)
    mine = {device: index for device, index in everywhere.items() if device.id in (0, 5)}
    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", lambda self, shape: mine)
    place = Placement(spec)
    assert place.held.tolist() == [2, 7]
    whole = np.arange(64, dtype=np.int32).reshape(SHAPE)
    given: dict[Any, np.ndarray[Any, Any]] = {}

    def record(shape: Any, sharding: Any, shard: Any) -> Any:
        given.update({device: shard(index) for device, index in mine.items()})

    monkeypatch.setattr(jax, "make_array_from_callback", record)
    rows = whole[:, place.held]
    place(Batch(rows, rows, rows, rows, rows))
    for device, index in mine.items():
        np.testing.assert_array_equal(given[device], whole[index])
