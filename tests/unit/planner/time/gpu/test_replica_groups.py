"""Groups of devices in all text forms. Those of iota and mesh forms are compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.planner.hlo import Instruction
from forerun.planner.time.gpu.replica_groups import GroupLayout, crosses_machines, device_groups, group_layout


def instruction(attributes: str) -> Instruction:
    return Instruction("x", "all-reduce", (), (), "", attributes, False)


def groups(attributes: str) -> list[tuple[int, ...]]:
    return device_groups(instruction(attributes))


def rows(array: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(number) for number in row) for row in array]


def test_lists() -> None:
    assert groups(", replica_groups={{0,1},{2,3}}, dimensions={0}") == [(0, 1), (2, 3)]
    assert groups(", replica_groups={{0,2,1,3}}") == [(0, 2, 1, 3)]
    assert groups(", replica_groups={}") == []
    assert group_layout(instruction(", replica_groups={}"), 8) == GroupLayout(1, 1)


def test_iota() -> None:
    assert groups("replica_groups=[8,2]<=[16]") == rows(np.arange(16).reshape(8, 2))
    expected = np.arange(16).reshape(4, 2, 2).transpose(2, 0, 1).reshape(4, 4)
    assert groups("replica_groups=[4,4]<=[4,2,2]T(2,0,1), use_global_device_ids=true") == rows(expected)


def test_mesh() -> None:
    devices = np.arange(16).reshape(2, 4, 2)
    assert groups("replica_groups=mesh['a'=2,'b'=4,'c'=2] {'b'}") == rows(devices.transpose(0, 2, 1).reshape(4, 4))
    assert groups("replica_groups=mesh['a'=2,'b'=4,'c'=2] {'a','c'}") == rows(devices.transpose(1, 0, 2).reshape(4, 4))


@pytest.mark.parametrize(
    ("attributes", "layout"),
    [
        ("replica_groups=[1,16]<=[16]", GroupLayout(16, 2)),
        ("replica_groups=[2,8]<=[16]", GroupLayout(8, 1)),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", GroupLayout(2, 2)),
        ("replica_groups={{0,8},{1,9}}", GroupLayout(2, 2)),
    ],
)
def test_machines_of_a_group(attributes: str, layout: GroupLayout) -> None:
    assert group_layout(instruction(attributes), 8) == layout


def test_permutes_between_machines() -> None:
    assert not crosses_machines(instruction("source_target_pairs={{0,1},{1,0}}"), 8)
    assert crosses_machines(instruction("source_target_pairs={{0,1},{7,8}}"), 8)
