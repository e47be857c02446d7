"""Charts of braille characters, each of which has two columns and four rows of dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column
_BLANK = 0x2800

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class BrailleChart:
    """Lines of braille characters, and the values at the bottom and at the top. None: there are no values."""

    lines: tuple[str, ...]
    low: float | None
    high: float | None


def braille_chart(points: Points, width: int, height: int, *, joined: bool = True) -> BrailleChart:
    """Return a chart of `height` lines of `width` characters with (x, y) points, ascending by x.

    Points that share a column of dots are drawn as their mean. The lowest value is at the bottom, the highest at the
    top. Values that are not finite are omitted. If `joined`, lines connect the points.
    """
    shown = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    cells = [[0] * width for _ in range(height)]
    dots = _columns(shown, 2 * width)
    levels = _levels(dots, 4 * height)
    for (x, y), (next_x, next_y) in pairwise(levels) if joined else ():
        for column in range(x, next_x + 1):
            share = (column - x) / (next_x - x)
            # Between two columns, the line also covers the rows of its slope, so that it has no gaps.
            ends = (share - 0.5 / (next_x - x), share + 0.5 / (next_x - x))
            low, high = sorted(round(y + (next_y - y) * min(1.0, max(0.0, end))) for end in ends)
            for row in range(low, high + 1):
                _set(cells, column, row)
    for x, y in levels:
        _set(cells, x, y)
    lines = tuple("".join(chr(_BLANK + cell) for cell in line) for line in cells)
    values = [value for _, value in dots]
    return BrailleChart(lines, min(values, default=None), max(values, default=None))


def _columns(points: Points, count: int) -> list[tuple[int, float]]:
    """Return the mean value of each column of dots that has points."""
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    scale = (count - 1) / (last - first) if last > first else 0.0
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        column = round((x - first) * scale)
        total, number = sums.get(column, (0.0, 0))
        sums[column] = (total + y, number + 1)
    return [(column, total / number) for column, (total, number) in sorted(sums.items())]


def _levels(dots: Sequence[tuple[int, float]], count: int) -> list[tuple[int, int]]:
    """Return the row of dots of each column, counted from the top."""
    low, high = min((y for _, y in dots), default=0.0), max((y for _, y in dots), default=0.0)
    scale = (count - 1) / (high - low) if high > low else 0.0
    middle = 0 if high > low else count // 2  # a constant is a line in the middle
    return [(x, middle or count - 1 - round((y - low) * scale)) for x, y in dots]


def _set(cells: list[list[int]], x: int, y: int) -> None:
    cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
