"""Collectives of a scheduled GPU program: how often each runs in a step, its bytes, and the groups of devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from forerun.planner.hlo import Instruction, Module

Groups = frozenset[frozenset[int]]

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """A collective instruction. `result_bytes` are those of one run on one device."""

    kind: str
    times: int  # runs in a step
    result_bytes: int
    groups: Groups

    @property
    def total_bytes(self) -> int:
        return self.times * self.result_bytes


def collectives(module: Module) -> list[Collective]:
    """Return the collectives of all computations that run, in the order of the schedule."""
    return [found for name, times in runs(module).items() for found in _in_computation(module, name, times)]


def runs(module: Module) -> Counter[str]:
    """Return how often each computation runs in a step: the entry, and the bodies of loops."""
    counts: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        counts[name] += times
        for x in module.computations[name].instructions:
            if x.op == "while":
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', x.attributes)
                assert trips, f"{x.name} has no trip count"
                visit(x.attribute("body") or "", times * int(trips[1]))
            elif x.op == "call":
                visit(x.attribute("to_apply") or "", times)

    visit(module.entry, 1)
    return counts


def _in_computation(module: Module, name: str, times: int) -> Iterator[Collective]:
    instructions = module.computations[name].instructions
    for x in instructions:
        inner = _collective(module, x)
        if inner is None:
            continue
        kind = inner.op.removesuffix("-start")
        done = x
        if x.op.endswith("-start"):  # the result of a start also contains its operands
            done = next(y for y in instructions if y.op.endswith("-done") and x.name in y.operands)
        yield Collective(kind, times, sum(shape.content_bytes for shape in done.shapes), groups_of(inner.attributes))


def _collective(module: Module, x: Instruction) -> Instruction | None:
    """Return the collective that an instruction is or starts. A reduce-scatter is in the computation of its start."""
    if x.op == "async-start":
        inside = module.computations[x.attribute("calls") or ""].instructions
        return next((y for y in inside if y.op in KINDS), None)
    return x if x.op.removesuffix("-start") in KINDS else None


def groups_of(attributes: str) -> Groups:
    """Return the groups of devices from the three notations: lists, a transposed range, or axes of a mesh.

    The groups of a collective-permute are its pairs of sender and receiver.
    """
    if found := _IOTA.search(attributes):
        numbers = _transposed(found[2], found[3]).reshape(_numbers(found[1]))
    elif found := _MESH.search(attributes):
        axes = {name: int(size) for name, _, size in (part.partition("=") for part in found[1].split(","))}
        sizes, names = tuple(axes.values()), list(axes)
        ids = _transposed(found[2], found[3]) if found[2] else np.arange(prod(sizes))
        inner = [names.index(name) for name in found[4].split(",")]
        outer = [n for n in range(len(names)) if n not in inner]
        size = prod(sizes[n] for n in inner)
        numbers = ids.reshape(sizes).transpose(*outer, *inner).reshape(-1, size)
    else:
        lists = _LISTS.search(attributes)
        assert lists, attributes[:300]
        numbers = np.array([_numbers(group) for group in re.findall(r"\{([\d,]+)\}", lists[1])])
    return frozenset(frozenset(int(n) for n in group) for group in numbers)


def _transposed(sizes_text: str, order_text: str | None) -> np.ndarray:
    sizes = _numbers(sizes_text)
    order = _numbers(order_text) if order_text else tuple(range(len(sizes)))
    return np.arange(prod(sizes)).reshape(sizes).transpose(order)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
