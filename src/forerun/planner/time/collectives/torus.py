"""The torus of a TPU slice: its links, where the partitions of a program are, and how busy a ring keeps the links.

An axis is closed (a ring) if it has wrap-around links. v5e and v6e close only axes of 16 chips. v4, v5p and tpu7x close
the axes of slices of 4x4x4 cubes. Twisted tori of v4 and v5p are not modelled: they are treated as plain ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import prod

from forerun.hardware.slices import CUBE, NAMED_BY_CHIPS, Slice

Coordinate = tuple[int, ...]  # of a device: one number per axis of chips, and the core on the chip
Link = tuple[Coordinate, int, int]  # a chip, and the axis and the direction in which it sends
_CLOSED_FROM = 16  # chips of the shortest closed axis of two-dimensional slices
# Orders in which jax numbers the devices of small slices, so that neighbours in the order are neighbours in the torus
# (jax.experimental.mesh_utils).
_RING_OF_4, _RING_OF_8 = (0, 1, 3, 2), (0, 1, 2, 3, 7, 6, 5, 4)
_RING_OF_16 = (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)
_TRAY_OF_8 = (0, 1, 2, 3, 6, 7, 4, 5)
_SMALL_RINGS: dict[Coordinate, tuple[int, ...]] = {(2, 2): _RING_OF_4, (2, 4): _RING_OF_8}


@dataclass(frozen=True)
class RingPath:
    """The links of rings that send in both directions.

    `load` is the number of streams on the busiest link; two streams halve the rate of each. `hops` is the number of
    links of one turn around a ring.
    """

    load: int
    hops: int


@dataclass(frozen=True)
class Torus:
    """The chips of a slice and the links between them."""

    sides: tuple[int, ...]  # chips along each axis
    closed: tuple[bool, ...]  # whether each axis has wrap-around links
    cores: int = 1  # JAX devices of a chip, which share its links
    orders_rings: bool = False  # whether the compiler orders the devices of a ring by their place in the torus

    @classmethod
    def of(cls, slice: Slice) -> Torus:
        sides = slice.shape
        if slice.chip.name in ("v2", "v3", *NAMED_BY_CHIPS):
            closed = tuple(side >= _CLOSED_FROM for side in sides)
        else:
            cubes = len(sides) == 3 and min(sides) >= CUBE
            closed = tuple(cubes and side % CUBE == 0 for side in sides)
        return cls(sides, closed, slice.chip.devices_per_chip, slice.chip.name in NAMED_BY_CHIPS)

    @property
    def devices(self) -> int:
        return prod(self.sides) * self.cores

    def places(self, mesh: tuple[int, ...]) -> tuple[Coordinate, ...]:
        """Return the coordinates of each partition of a program, for the sizes of its mesh, outermost axis first.

        The assignment is that of `jax.experimental.mesh_utils.create_device_mesh` with split axes.
        """
        return _places(self, mesh)

    def ring(self, rings: Sequence[Sequence[Coordinate]]) -> RingPath:
        """Return the path of rings that run at the same time, each in both directions."""
        streams: Counter[Link] = Counter()
        hops = 0
        for ring in rings:
            turn = 0
            for here, there in pairwise((*ring, ring[0])):
                forth = list(self.route(here, there))
                streams.update(forth)
                streams.update(self.route(there, here))
                turn += len(forth)
            hops = max(hops, turn)
        return RingPath(max(streams.values(), default=0), hops)

    def best_ring(self, groups: Sequence[Sequence[Coordinate]]) -> RingPath:
        """Return the path of the rings of some groups, in the order that the compiler uses."""
        given = self.ring(groups)
        if not self.orders_rings:
            return given
        snakes = self.ring([_snake(group) for group in groups])
        return min(given, snakes, key=lambda path: (path.load, path.hops))

    def load(self, pairs: Sequence[tuple[Coordinate, Coordinate]]) -> int:
        """Return the number of messages on the busiest link, if each pair (source, target) sends one message."""
        streams: Counter[Link] = Counter()
        for source, target in pairs:
            streams.update(self.route(source, target))
        return max(streams.values(), default=0)

    def route(self, source: Coordinate, target: Coordinate) -> Iterator[Link]:
        """Yield the links of a message: along one axis after the other, the shorter way around."""
        here = list(source[: len(self.sides)])
        for axis, side in enumerate(self.sides):
            ahead = target[axis] - here[axis]
            if self.closed[axis]:
                ahead %= side
                if ahead > side // 2:
                    ahead -= side
            step = 1 if ahead > 0 else -1
            for _ in range(abs(ahead)):
                yield tuple(here), axis, step
                here[axis] = (here[axis] + step) % side


def _snake(group: Sequence[Coordinate]) -> list[Coordinate]:
    """Return the devices of a group in an order whose neighbours are near.

    The order is a closed ring if an axis of the group has an even number of places: forward along the first column
    and back through the others, row by row. A single open axis is folded: even places forward, odd places back.
    """
    axes = [sorted({place[axis] for place in group}) for axis in range(len(group[0]))]
    long = [axis for axis, places in enumerate(axes) if len(places) > 1]
    if len(long) == 1:
        line = sorted(group, key=lambda place: place[long[0]])
        return [*line[::2], *line[1::2][::-1]]
    if len(long) != 2 or len(group) != len(axes[long[0]]) * len(axes[long[1]]):
        return list(group)
    rows, columns = long if len(axes[long[0]]) % 2 == 0 else long[::-1]
    at = {(place[rows], place[columns]): place for place in group}
    first, *others = axes[columns]
    ring = [at[row, first] for row in axes[rows]]
    for number, row in enumerate(reversed(axes[rows])):
        ring += [at[row, column] for column in (others if number % 2 == 0 else others[::-1])]
    return ring


@cache
def _places(torus: Torus, mesh: tuple[int, ...]) -> tuple[Coordinate, ...]:
    chips = [*torus.sides, *((1,) if len(torus.sides) == 2 else ())]
    order = _small_order(torus, mesh)
    if order is not None:
        by_x = [tuple(reversed(place)) for place in product(*(range(side) for side in reversed(chips)))]
        devices = [(*place, core) for place in by_x for core in range(torus.cores)]
        return tuple(devices[index][: len(torus.sides)] + devices[index][-1:] for index in order)
    shape = [*torus.sides, *((torus.cores,) if torus.cores > 1 else ())]
    return _assigned(torus, shape, mesh)


def _small_order(torus: Torus, mesh: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order of the devices of a small slice, in which x changes first, or None for the general rule."""
    if torus.orders_rings:
        if torus.sides == (4, 4) and max(mesh) == 16:
            return _RING_OF_16
        return _SMALL_RINGS.get(torus.sides)
    flat = len(torus.sides) == 2
    if torus.cores == 2 and flat and torus.devices > 8 and mesh[-1] != 8:
        return tuple(range(torus.devices))
    if torus.cores == 2 and (flat or (torus.devices <= 32 and torus.devices % 8 == 0 and max(torus.sides[:2]) <= 2)):
        return tuple(tray + index for tray in range(0, torus.devices, 8) for index in _TRAY_OF_8)
    return None


def _assigned(torus: Torus, shape: list[int], mesh: tuple[int, ...]) -> tuple[Coordinate, ...]:
    """Return the coordinates of the partitions if each axis of the mesh gets one or more axes of the slice.

    The innermost axis of the mesh chooses first. It prefers complete axes of the slice, then many of them.
    """
    free, taken = list(shape), [1] * len(shape)
    shares: list[tuple[int, ...]] = []
    for size in reversed(mesh):
        best = max(_splits(size, tuple(free)), key=lambda split: _preference(split, shape, taken))
        shares.insert(0, best)
        free = [left // used for left, used in zip(free, best, strict=True)]
        taken = [before * used for before, used in zip(taken, best, strict=True)]
    places = []
    for digits in product(*(range(part) for share in shares for part in share)):
        place = []
        for axis in range(len(shape)):
            value = 0
            for number, share in enumerate(shares):
                value = value * share[axis] + digits[number * len(shape) + axis]
            place.append(value)
        places.append(tuple(place) if torus.cores > 1 else (*place, 0))
    return tuple(places)


def _splits(size: int, free: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all ways to write `size` as a product of one divisor of each free axis."""
    if not free:
        return [()] if size == 1 else []
    parts = (part for part in range(1, min(size, free[0]) + 1) if size % part == 0 and free[0] % part == 0)
    return [(part, *rest) for part in parts for rest in _splits(size // part, free[1:])]


def _preference(
    split: tuple[int, ...], shape: Sequence[int], taken: Sequence[int]
) -> tuple[int, int, int, tuple[int, ...]]:
    """Return the sort key of a split: size of complete axes, their number, use of axes already taken, and the first."""
    complete = [part for part, side in zip(split, shape, strict=True) if part == side]
    beside = prod(part for part, used in zip(split, taken, strict=True) if used > 1)
    return prod(complete), sum(part > 1 for part in complete), beside, split
