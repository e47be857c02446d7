"""Curves as one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.,-=+*#"


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a curve of at most `width` characters. Each character shows the mean of successive values."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return blocks[0] * count
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in means)


def blocks_for(encoding: str) -> str:
    """Return the characters of a curve that a terminal with this encoding can show."""
    return BLOCKS if encoding.lower().replace("-", "").startswith("utf") else ASCII


class Sparkline:
    """A chart of at most `width` characters.

    It stores at most `2 * width` means, each of the same number of values. A long run therefore needs no more memory
    than a short one.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._means: list[float] = []
        self._per_mean = 1
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        """Add a value. Values that are not finite are ignored."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._per_mean:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == 2 * self._width:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._per_mean *= 2

    def __str__(self) -> str:
        """Return at most `width` blocks, the oldest first, scaled from the smallest to the largest value."""
        return sparkline(list(self._means), self._width)  # a copy: another thread may add values
