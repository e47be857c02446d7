"""Curves as one line of text."""

from __future__ import annotations

import itertools
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
