"""Histogram of document lengths. The capacity of a row is always a border between bins."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun.data.inspect.corpus_report import Lengths

WIDE_RANGE = 12  # ratio of the longest to the shortest length above which bins grow by a factor
FACTORS = (2**0.25, 2**0.5, 2.0, 4.0)


@dataclass(frozen=True)
class Bin:
    """A bin of the lengths `low` .. `high`, inclusive."""

    low: int
    high: int
    count: int
    longer: bool  # than the sequence

    @property
    def label(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"


@dataclass(frozen=True)
class Histogram:
    """Bins in order of length."""

    bins: tuple[Bin, ...]
    growing: bool  # bins are equally wide on a logarithmic scale

    @property
    def most(self) -> int:
        """The count of the largest bin."""
        return max((one.count for one in self.bins), default=0)

    @property
    def cut(self) -> int | None:
        """The number of bins below the capacity of a row, or None if no document is longer."""
        return next((n for n, one in enumerate(self.bins) if one.longer), None)


def histogram(lengths: Lengths, sequence: int, most: int) -> Histogram:
    """Return a histogram of at most `most` bins. The bins grow by a factor if the lengths differ much."""
    values = lengths.values
    if not len(values):
        return Histogram((), growing=False)
    low, high = max(1, int(values.min())), max(1, int(values.max()))
    growing = high / low > WIDE_RANGE
    uppers = _growing_ends(low, high, sequence, most) if growing else _even_ends(low, high, sequence, most)
    sorted_values = np.sort(values)
    upto = np.searchsorted(sorted_values, uppers, side="right")
    counts = np.diff(np.concatenate([[0], upto]))
    lows = [min(low, uppers[0]), *(upper + 1 for upper in uppers[:-1])]
    bins = tuple(
        Bin(begin, end, count, begin > sequence + 1)
        for begin, end, count in zip(lows, uppers, counts.tolist(), strict=True)
    )
    return Histogram(bins, growing)


def _growing_ends(low: int, high: int, sequence: int, most: int) -> list[int]:
    """Return the upper ends of bins that grow by a factor, from the sequence in both directions."""
    for factor in FACTORS:
        first = math.floor(math.log(low / sequence, factor))
        last = math.ceil(math.log(high / sequence, factor))
        uppers = [math.floor(sequence * factor**k + 1e-9) for k in range(first, last + 2)]
        uppers = _trimmed(uppers, low, high, sequence)
        if len(uppers) <= most:
            return uppers
    return uppers


def _even_ends(low: int, high: int, sequence: int, most: int) -> list[int]:
    """Return the upper ends of bins of one round width, aligned to the sequence if it is in the range of lengths."""
    width = max(1, _round_up((high - low + 1) / max(1, most - 2)))
    anchor = sequence % width if low <= sequence < high else 0
    first = (low - anchor) // width
    uppers = [anchor + width * k for k in range(first, first + most + 3)]
    return _trimmed(uppers, low, high, sequence)


def _trimmed(uppers: list[int], low: int, high: int, sequence: int) -> list[int]:
    """Return the upper ends without empty bins at both sides, and with sequence + 1 in place of sequence.

    A row holds one token more than it has positions.
    """
    exact = {sequence + 1 if upper == sequence else upper for upper in uppers}
    kept = sorted(upper for upper in exact if upper >= low)
    end = next((n for n, upper in enumerate(kept) if upper >= high), len(kept) - 1)
    return kept[: end + 1]


def _round_up(value: float) -> int:
    """Return the next larger 1, 2 or 5 times a power of ten."""
    if value <= 1:
        return 1
    decade = 10 ** math.floor(math.log10(value))
    return next(int(step * decade) for step in (1, 2, 5, 10) if step * decade >= value - 1e-9)
