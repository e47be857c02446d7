"""Windows: consecutive units of the data, which training uses one after the other in its first pass.

The windows depend only on the sizes of the units, and these on the sizes of the files. The first windows are small, so
that training starts soon. Later ones are larger, because rows are shuffled only within a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from forerun.units import MIB

FIRST_BYTES = 4 * MIB
LARGEST_BYTES = 256 * MIB
RULE = f"windows {FIRST_BYTES} x2 {LARGEST_BYTES}"  # part of the identity of the order


@dataclass(frozen=True)
class UnitRange:
    """The units `start` .. `stop - 1` of a part."""

    part: int
    start: int
    stop: int


Window = tuple[UnitRange, ...]


def windows_of(parts: Sequence[int], sizes_bytes: Sequence[Sequence[int]]) -> list[Window]:
    """Return the windows of some parts. Together they contain every unit once.

    Units are taken in the order of the share of their part that precedes them, so all parts are used at the same pace.
    The first window has a unit of each part. A window is closed when it has its size: 4 MiB, 8 MiB, ... 256 MiB.

    Args:
      parts: the numbers of the parts.
      sizes_bytes: for each of these parts, the sizes of its units.
    """
    order: list[tuple[Fraction, int, int]] = []
    for at, sizes in enumerate(sizes_bytes):
        total, before = max(1, sum(sizes)), 0
        for unit, size in enumerate(sizes):
            order.append((Fraction(before, total), at, unit))
            before += size
    windows: list[Window] = []
    held: dict[int, tuple[int, int]] = {}  # part to its range of units
    held_bytes, target_bytes = 0, FIRST_BYTES
    for _, at, unit in sorted(order):
        if held_bytes >= target_bytes and (windows or len(held) == len(parts)):
            windows.append(_window(parts, held))
            held, held_bytes, target_bytes = {}, 0, min(2 * target_bytes, LARGEST_BYTES)
        held[at] = (held.get(at, (unit, unit))[0], unit + 1)
        held_bytes += sizes_bytes[at][unit]
    return [*windows, _window(parts, held)]


def _window(parts: Sequence[int], held: dict[int, tuple[int, int]]) -> Window:
    return tuple(UnitRange(parts[at], *held[at]) for at in sorted(held))
