"""The devices that take part in a collective, and how they are distributed over machines."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from forerun.planner.hlo import Instruction

_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{(\{[\d,{}\s]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}\s]*\})\}")


@dataclass(frozen=True)
class GroupLayout:
    """One group of a collective: its devices, the machines that they are on, and the devices on each machine."""

    devices: int
    nodes: int

    @property
    def devices_per_node(self) -> float:
        return self.devices / self.nodes


def group_layout(x: Instruction, devices_per_host: int) -> GroupLayout:
    """Return the layout of the group that is spread over the most machines."""
    layouts = [
        GroupLayout(len(group), len({device // devices_per_host for device in group})) for group in device_groups(x)
    ]
    return max(layouts, key=lambda layout: (layout.nodes, layout.devices), default=GroupLayout(1, 1))


def device_groups(x: Instruction) -> list[tuple[int, ...]]:
    """Return the groups of device numbers, from any of the text forms. An empty list means: not stated."""
    if found := _MESH.search(x.attributes):
        return _mesh_groups(found[1], found[2])
    if found := _IOTA.search(x.attributes):
        return _iota_groups(int(found[1]), int(found[2]), _numbers(found[3]), _numbers(found[4] or ""))
    if found := _LISTS.search(x.attributes):
        return [_numbers(inside) for inside in re.findall(r"\{([\d,\s]*)\}", found[1])]
    return []


def crosses_machines(x: Instruction, devices_per_host: int) -> bool:
    """Return whether a collective-permute sends between machines."""
    found = _PAIRS.search(x.attributes)
    pairs = [_numbers(inside) for inside in re.findall(r"\{([\d,\s]*)\}", found[1])] if found else []
    return any(source // devices_per_host != target // devices_per_host for source, target in pairs)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _iota_groups(groups: int, size: int, dims: tuple[int, ...], order: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return groups of the form `[groups,size]<=[dims]T(order)`: an iota of `dims`, transposed and cut into rows."""
    flat = _transposed(dims, order or tuple(range(len(dims))))
    return [tuple(flat[start : start + size]) for start in range(0, groups * size, size)]


def _mesh_groups(axes: str, used: str) -> list[tuple[int, ...]]:
    """Return groups of the form `mesh['a'=2,'b'=4] {'b'}`: the devices along the named axes."""
    sizes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)]
    names = re.findall(r"'(\w+)'", used)
    dims = tuple(size for _, size in sizes)
    along = [number for number, (name, _) in enumerate(sizes) if name in names]
    rest = [number for number in range(len(sizes)) if number not in along]
    flat = _transposed(dims, (*rest, *along))
    size = math.prod(dims[number] for number in along)
    return [tuple(flat[start : start + size]) for start in range(0, len(flat), size)]


def _transposed(dims: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """Return the elements of an iota of shape `dims` after a transpose, in row-major order."""
    strides = [math.prod(dims[number + 1 :]) for number in range(len(dims))]
    flat = [0]
    for number in order:
        flat = [base + index * strides[number] for base in flat for index in range(dims[number])]
    return flat
