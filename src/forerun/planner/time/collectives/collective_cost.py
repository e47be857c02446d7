"""The time of a collective on the links of a torus, and the strategy with which the compiler carries it out.

Bandwidth: the bytes on the busiest link over its rate. Latency: the hops along the rings. Collectives of several groups
run at the same time and share links, and so do the two devices of a tpu7x chip.

The strategy consists of rings, phases and colors. A color is a part of the data that takes its own way through the
torus. A phase is a ring along one axis. Colors begin with different axes, so that all links of the torus are busy. The
compiler chooses the strategy when it generates code. The program that `plan` reads is dumped before that, so
`expected_strategy` predicts the choice. The rule was found by compiling single collectives, and
tests/aot/test_collectives.py compares it with the compiler's own text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from forerun.planner.hlo import SYNC, Computation, Instruction, Module
from forerun.planner.time.chip_model import ChipModel
from forerun.planner.time.collectives.replica_groups import Groups, mesh_of, replica_groups, source_target_pairs
from forerun.planner.time.collectives.torus import Coordinate, RingPath, Torus
from forerun.planner.time.transfers import is_collective

_SEMAPHORE = 4  # memory space
OFFLOADED = "sparsecore"  # the thread of collectives that a sparse core carries out
SMALLEST_SIDE = 4  # chips; with a shorter axis, v5e and v6e use one ring through both axes


@dataclass(frozen=True)
class CollectiveStrategy:
    """The rings of a collective.

    `phases` has the devices of the ring of each phase, in the order of the first color. A single phase is one ring
    through all devices of the group. Both directions of a ring are used.
    """

    phases: tuple[int, ...]

    @property
    def one_ring(self) -> bool:
        return len(self.phases) == 1


@dataclass(frozen=True)
class GroupShape:
    """The part of a torus that the devices of one group occupy."""

    axes: tuple[int, ...]  # the axes along which the group has more than one chip
    sides: tuple[int, ...]  # chips of the group along each of these axes
    complete: bool  # whether the group has every chip along its axes
    cores: int  # devices of the group on one chip

    @classmethod
    def of(cls, torus: Torus, group: Sequence[Coordinate]) -> GroupShape:
        places = [{place[axis] for place in group} for axis in range(len(torus.sides))]
        axes = tuple(axis for axis, found in enumerate(places) if len(found) > 1)
        chips = {place[: len(torus.sides)] for place in group}
        sides = tuple(len(places[axis]) for axis in axes)
        complete = all(side == torus.sides[axis] for axis, side in zip(axes, sides, strict=True))
        return cls(axes, sides, complete, len(group) // max(len(chips), 1))


def stated_strategy(text: str) -> CollectiveStrategy | None:
    """Return the strategy that the attributes of a collective state, or None. Only compiled programs state it."""
    found = re.search(r"cores:\{([\d ]+)\}", text)
    if found:
        return CollectiveStrategy(tuple(int(count) for count in found[1].split()))
    found = re.search(r"(\d)DAllGather.*?group_size = (\d+)", text)
    if found is None:
        return None
    axes, devices = int(found[1]), int(found[2])
    return CollectiveStrategy((devices,) if axes == 1 else (round(devices ** (1 / axes)),) * axes)


def expected_strategy(
    op: str, torus: Torus, shape: GroupShape, devices: int, *, major: bool = True, offloaded: bool = False
) -> CollectiveStrategy:
    """Return the strategy that the compiler is expected to choose.

    Args:
        op: The collective.
        torus: The torus of the slice.
        shape: The part of the torus that a group occupies.
        devices: The number of devices of a group.
        major: Whether an all-gather appends the parts along the first dimension.
        offloaded: Whether a sparse core carries out the collective.
    """
    several = len(shape.axes) > 1 and shape.complete
    if torus.orders_rings:
        several = several and op == "all-reduce" and min(shape.sides) >= SMALLEST_SIDE
    elif op != "all-reduce" and not offloaded:
        # v4 and v5p gather and scatter along several axes only in boxes of 2x2 or 2x2x2 chips.
        several = several and max(shape.sides) == 2 and (major or op != "all-gather")
    return CollectiveStrategy(shape.sides if several else (devices,))


class CollectiveCost:
    """The times of the collectives of one program.

    Args:
        module: The scheduled program. Its groups show the mesh, and the mesh decides where each partition is.
        machine: The rates of the links.
        torus: The torus of the slice. None is a closed ring for each group, without contention.
    """

    def __init__(self, module: Module, machine: ChipModel, torus: Torus | None = None) -> None:
        self.module, self.machine, self.torus = module, machine, torus
        self._paths: dict[Groups, RingPath] = {}

    @cached_property
    def _places(self) -> tuple[Coordinate, ...] | None:
        """The coordinates of each partition, or None if they are unknown."""
        if self.torus is None:
            return None
        collectives = [x for one in self.module.computations.values() for x in one.instructions if is_collective(x)]
        used = {replica_groups(x) for x in collectives}
        pairs = [pair for x in collectives for pair in source_target_pairs(x)]
        last = max((member for groups in used for group in groups for member in group), default=0)
        if max([last, *(max(pair) for pair in pairs)]) >= self.torus.devices:
            return None  # the program is for more devices than the slice has: several slices
        return self.torus.places(mesh_of(used, self.torus.devices))

    def seconds(
        self, computation: Computation, x: Instruction, *, offloaded: bool = False, scattered: bool = False
    ) -> float:
        """Return the time of a collective.

        Args:
            computation: The computation that contains it.
            x: The collective.
            offloaded: Whether a sparse core carries it out.
            scattered: Whether each device keeps only its part of an all-reduce, which is a reduce-scatter.
        """
        op = "reduce-scatter" if scattered else x.op.removesuffix("-start")
        arrays = [shape for shape in x.shapes if shape.space not in (SYNC, _SEMAPHORE)]
        if op == "collective-permute":
            moved = max((shape.size_bytes for shape in arrays), default=0.0)
            return self._permute(x, moved)
        groups = replica_groups(x)
        devices = max(len(groups[0]), 1) if groups else 1
        fixed = self.machine.offload_seconds if offloaded else self.machine.collective_seconds
        if devices == 1:
            return fixed
        into = sum(operand.size_bytes for name in x.operands if (operand := computation.by_name.get(name)))
        if op in ("all-to-all", "ragged-all-to-all"):
            return fixed + self._all_to_all(groups, into)
        # The result of an asynchronous all-gather is a tuple that also has the operand, so compute the size instead.
        complete = into
        if op == "all-gather":
            complete = into * devices if x.op.endswith("-start") else sum(shape.size_bytes for shape in arrays)
        strategy = stated_strategy(x.attributes) or self._expected(op, groups, x, offloaded)
        one_ring = strategy.one_ring or self._places is None
        once = self._ring(groups, complete) if one_ring else self._phases(groups, complete)
        # An all-reduce is a reduce-scatter and an all-gather.
        return fixed + (2 if op == "all-reduce" else 1) * once

    def _expected(self, op: str, groups: Groups, x: Instruction, offloaded: bool) -> CollectiveStrategy:
        if self.torus is None or self._places is None:
            return CollectiveStrategy((len(groups[0]),))
        shape = GroupShape.of(self.torus, [self._places[member] for member in groups[0]])
        major = "dimensions={0}" in x.attributes
        return expected_strategy(op, self.torus, shape, len(groups[0]), major=major, offloaded=offloaded)

    def _path(self, groups: Groups) -> RingPath:
        """Return the path of the rings of all groups."""
        if groups not in self._paths:
            if self.torus is None or self._places is None:
                self._paths[groups] = RingPath(1, len(groups[0]))
            else:
                places = self._places
                self._paths[groups] = self.torus.best_ring([[places[member] for member in group] for group in groups])
        return self._paths[groups]

    def _ring(self, groups: Groups, size_bytes: float) -> float:
        """Return the time in which one ring per group gathers or scatters `size_bytes`, without the fixed latency."""
        devices, path = len(groups[0]), self._path(groups)
        stream = size_bytes * (devices - 1) / devices / 2  # bytes in each direction
        return stream * path.load / self.machine.link_bytes_per_second + self.machine.hop_seconds * path.hops / 2

    def _phases(self, groups: Groups, size_bytes: float) -> float:
        """Return the time of rings along one axis after the other, for as many colors as axes.

        Each color has an equal part of the data. Its first phase moves nearly all of it, and the next one moves only
        what is left on each device.
        """
        assert self.torus is not None
        assert self._places is not None
        shape = GroupShape.of(self.torus, [self._places[member] for member in groups[0]])
        axes = list(zip(shape.axes, shape.sides, strict=True))
        # Devices of a chip that are in one group first share the data among each other over the chip's own wires.
        part = size_bytes / len(axes) / shape.cores
        slowest = latency = 0.0
        for color in range(len(axes)):
            seconds, left = 0.0, part
            for axis, side in axes[color:] + axes[:color]:
                streams = self.torus.cores * (1 if self.torus.closed[axis] else 2)
                seconds += left * (side - 1) / side / 2 * streams / self.machine.link_bytes_per_second
                left /= side
            slowest = max(slowest, seconds)
        for axis, side in axes:
            latency += self.machine.hop_seconds * side / 2 * (1 if self.torus.closed[axis] else 2)
        return slowest + latency

    def _all_to_all(self, groups: Groups, size_bytes: float) -> float:
        """Return the time of an all-to-all: half of the data crosses the middle of each axis of the group."""
        machine = self.machine
        if self.torus is None or self._places is None:
            ring = len(groups[0])
            share = (ring * ring // 4) / ring / 2
            return size_bytes * share / machine.link_bytes_per_second + machine.hop_seconds * ring / 2
        shape = GroupShape.of(self.torus, [self._places[member] for member in groups[0]])
        slowest = latency = 0.0
        for axis, side in zip(shape.axes, shape.sides, strict=True):
            closed = self.torus.closed[axis] and side == self.torus.sides[axis]
            # Each device sends 1/side of its data to every place. A link in the middle of an open axis carries the
            # data of side/2 devices for side/2 places; in a ring, each piece takes the shorter way.
            share = (side * side // 4) / side / (2 if closed else 1)
            # Groups that are interleaved on one axis share its links.
            beside = 1 if closed else max(1, self._stride(axis, groups[0]))
            slowest = max(slowest, size_bytes * share * beside * self.torus.cores / machine.link_bytes_per_second)
            latency += machine.hop_seconds * side / (2 if closed else 1)
        return slowest + latency

    def _stride(self, axis: int, group: Sequence[int]) -> int:
        """Return the distance along an axis between neighbours of a group."""
        assert self._places is not None
        at = sorted({self._places[member][axis] for member in group})
        return at[1] - at[0] if len(at) > 1 else 1

    def _permute(self, x: Instruction, size_bytes: float) -> float:
        """Return the time of a collective-permute: each pair sends over the links between its devices."""
        load, places, torus = 1, self._places, self.torus
        if torus is not None and places is not None:
            pairs = [(places[source], places[target]) for source, target in source_target_pairs(x)]
            # Loops that overlap a matmul with permutes send in both directions at the same time.
            load = max(1, torus.load(pairs + [(target, source) for source, target in pairs]))
        return size_bytes * load / self.machine.link_bytes_per_second + self.machine.collective_seconds
