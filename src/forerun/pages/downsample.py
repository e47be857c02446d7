"""Shorter curves with the same extremes, so that the page of a long run stays small."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]
MAX_POINTS = 1000


def downsample(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most `most` of the points, in their order.

    The first and the last point stay. The others are divided into buckets of equal size, and each bucket keeps its
    lowest and its highest point. A spike of one step therefore stays visible.

    Args:
      points: (x, y) in order of x.
      most: the number of points to keep, 4 or more.
    """
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    buckets = (most - 2) // 2
    kept = [points[0]]
    for number in range(buckets):
        begin, end = number * len(inner) // buckets, (number + 1) * len(inner) // buckets
        places = range(begin, end)
        low, high = min(places, key=lambda at: inner[at][1]), max(places, key=lambda at: inner[at][1])
        kept += [inner[at] for at in sorted({low, high})]
    return [*kept, points[-1]]
