"""The groups of devices that take part in a collective, and the mesh that they imply."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import product
from math import prod

from forerun.planner.hlo import Instruction

Groups = tuple[tuple[int, ...], ...]  # the partitions of each group, in the order of the group
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]*)\](?:T\(([\d,]*)\))?\))?\s*\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\](?:<=\[([\d,]*)\](?:T\(([\d,]*)\))?)?")
_LISTS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")


def replica_groups(x: Instruction) -> Groups:
    """Return the groups of a collective. The compiler writes them as mesh axes, as an iota, or as lists."""
    found = re.search(r"replica_groups=(?:mesh\[.*?\}|\[[^ ]*|\{\{.*?\}\})", x.attributes)
    return _groups(found[0]) if found else ()


def source_target_pairs(x: Instruction) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) partitions of a collective-permute."""
    found = re.search(r"source_target_pairs=\{(\{.*?\})\}", x.attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found[1]) if found else []
    return tuple((int(source), int(target)) for source, target in pairs)


@cache
def _groups(text: str) -> Groups:
    if found := _MESH.match(text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        wanted = re.findall(r"'(\w+)'", found[4])
        devices = _iota(_numbers(found[2]), _numbers(found[3])) if found[2] else range(prod(sizes.values()))
        return _along(tuple(sizes), sizes, [name for name in wanted if name in sizes], tuple(devices))
    if found := _IOTA.match(text):
        count, size = int(found[1]), int(found[2])
        ids = _iota(_numbers(found[3]), _numbers(found[4])) if found[3] else tuple(range(count * size))
        return tuple(ids[start : start + size] for start in range(0, count * size, size))
    if found := _LISTS.match(text):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    return ()


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


def _iota(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return 0, 1, 2, ... in `shape`, transposed by `order` and flattened."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axes = order or tuple(range(len(shape)))
    places = product(*(range(shape[axis]) for axis in axes))
    return tuple(sum(strides[axis] * at for axis, at in zip(axes, place, strict=True)) for place in places)


def _along(names: tuple[str, ...], sizes: dict[str, int], wanted: list[str], devices: tuple[int, ...]) -> Groups:
    """Return the groups of a mesh along the wanted axes."""
    strides = {name: prod(sizes[later] for later in names[index + 1 :]) for index, name in enumerate(names)}
    others = [name for name in names if name not in wanted]
    return tuple(
        tuple(
            devices[sum(strides[name] * at for name, at in zip((*others, *wanted), (*outer, *inner), strict=True))]
            for inner in product(*(range(sizes[name]) for name in wanted))
        )
        for outer in product(*(range(sizes[name]) for name in others))
    )


def mesh_of(all_groups: Iterable[Groups], devices: int) -> tuple[int, ...]:
    """Return the sizes of the mesh that the groups of a program imply, outermost axis first.

    A group of n partitions with a constant stride s shows that the mesh has an axis boundary at s and at s x n.
    """
    bounds = {1, devices}
    for groups in all_groups:
        first = groups[0] if groups else ()
        if len(first) < 2:
            continue
        stride = first[1] - first[0]
        if stride > 0 and all(member == first[0] + stride * at for at, member in enumerate(first)):
            bounds |= {stride, stride * len(first)}
    kept: list[int] = []
    for bound in sorted(bounds):
        if devices % bound == 0 and (not kept or bound % kept[-1] == 0):
            kept.append(bound)
    return tuple(outer // inner for inner, outer in zip(reversed(kept[:-1]), reversed(kept[1:]), strict=True)) or (1,)
