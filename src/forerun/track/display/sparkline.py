"""A chart of all values of a metric in a few characters."""

from __future__ import annotations

import itertools
import math

BLOCKS = "▁▂▃▄▅▆▇█"


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
        means = list(self._means)
        if len(means) > self._width:
            edges = [i * len(means) // self._width for i in range(self._width + 1)]
            means = [sum(means[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
        if not means:
            return ""
        low, high = min(means), max(means)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)
