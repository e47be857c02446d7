"""A node and a driver of a Ray cluster are killed: the store is the one that a single machine builds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ray_rig import Driver, RayRig, contents, finished_units, three_nodes, write_rows

UNIT_BYTES = 60_000
MEGABYTES = 1.2  # about 20 units


@pytest.fixture(scope="module")
def rig() -> Iterator[RayRig]:
    with three_nodes() as rig:
        yield rig


@pytest.mark.timing
def test_a_killed_driver_and_a_killed_node_change_no_byte(rig: RayRig, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", MEGABYTES)
    alone = Driver(None, data, "bytes", tmp_path / "alone", UNIT_BYTES)
    alone.finish()
    wanted = contents(tmp_path / "alone")
    assert sum(name.endswith("unit.json") for name in wanted) > 15

    root = tmp_path / "cluster"
    first = Driver(rig.address, data, "bytes", root, UNIT_BYTES)
    assert first.wait_until(lambda: len(finished_units(root)) >= 3)
    first.kill()
    before = finished_units(root)
    assert len(before) >= 3
    assert not (next(root.iterdir()) / "index.json").exists()

    second = Driver(rig.address, data, "bytes", root, UNIT_BYTES)
    assert second.wait_until(lambda: second.units_done() > len(before))
    assert rig.kill_node(0) >= 2  # its raylet and at least one worker
    second.finish()
    assert {name: inode for name, inode in finished_units(root).items() if name in before} == before
    assert contents(root) == wanted
