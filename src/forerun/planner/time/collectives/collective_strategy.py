"""The strategy with which the compiler carries out a collective: rings, phases and colors.

A color is a part of the data that takes its own way through the torus. A phase is a ring along one axis. Colors begin
with different axes, so that all links of the torus are busy.

The compiler chooses the strategy when it generates code. The program that `plan` reads is dumped before that, so
`expected_strategy` predicts the choice. The rule was found by compiling single collectives, and
tests/aot/test_collectives.py compares it with the compiler's own text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.planner.time.collectives.torus import Coordinate, Torus

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
