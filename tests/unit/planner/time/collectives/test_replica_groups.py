"""Groups as the compiler writes them, and the mesh that they imply."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.planner.hlo import parse
from forerun.planner.time.collectives.replica_groups import Groups, mesh_of, replica_groups, source_target_pairs

GRID = np.arange(64).reshape(2, 8, 4)


def groups_of(text: str) -> Groups:
    line = f"%y = f32[8]{{0}} all-reduce(%part), channel_id=1, {text}, to_apply=%add, backend_config={{}}"
    module = parse(
        f"HloModule m\n\nENTRY %main (part: f32[8]) -> () {{\n  %part = f32[8]{{0}} parameter(0)\n  {line}\n}}\n"
    )
    return replica_groups(module.computations["main"].by_name["y"])


def rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(member) for member in row) for row in array)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", np.arange(8).reshape(2, 4)),
        ("replica_groups=[4,2]<=[8]", np.arange(8).reshape(4, 2)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", np.arange(8).reshape(4, 2).T),
        ("replica_groups=mesh['data'=2,'fsdp'=8,'tp'=4] {'fsdp'}", GRID.transpose(0, 2, 1).reshape(8, 8)),
        ("replica_groups=mesh['a'=2,'b'=8,'c'=4] {'a','b'}", GRID.transpose(2, 0, 1).reshape(4, 16)),
        ("replica_groups=mesh['a'=4,'b'=16], device_ids=([16,4]T(1,0)) {'b'}", np.arange(64).reshape(16, 4).T),
    ],
)
def test_groups(text: str, groups: np.ndarray) -> None:
    assert groups_of(text) == rows(groups)


@pytest.mark.parametrize(
    ("groups", "devices", "mesh"),
    [
        ([rows(GRID.reshape(16, 4))], 64, (16, 4)),
        ([rows(GRID.reshape(16, 4)), rows(GRID.transpose(0, 2, 1).reshape(8, 8))], 64, (2, 8, 4)),
        ([rows(GRID.reshape(1, 64))], 64, (64,)),
        ([], 8, (8,)),
        ([((0,), (1,))], 1, (1,)),
    ],
)
def test_mesh(groups: list[Groups], devices: int, mesh: tuple[int, ...]) -> None:
    assert mesh_of(groups, devices) == mesh


def test_pairs() -> None:
    text = "HloModule m\n\nENTRY %main (part: f32[8]) -> () {\n  %part = f32[8]{0} parameter(0)\n"
    text += "  %y = f32[8]{0} collective-permute(%part), source_target_pairs={{0,1},{1,0}}\n}\n"
    assert source_target_pairs(parse(text).computations["main"].by_name["y"]) == ((0, 1), (1, 0))
