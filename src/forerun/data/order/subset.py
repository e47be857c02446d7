"""Subsets of the rows of a source, chosen by a fixed permutation: rows held out for validation, and the others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from forerun.data.order.permutation import ORDER, permuted
from forerun.data.order.rows import Arrays, Example, PackedRows, RowCounts

KEY = 0x5EED_0FF5E7  # fixed: all jobs with the same rows hold out the same ones, independent of their seeds


@dataclass(frozen=True)
class Subset:
    """Rows number `start` .. `stop - 1` of all rows in permuted order. It stores no data per row."""

    rows: PackedRows
    start: int
    stop: int

    @property
    def sequence(self) -> int:
        return self.rows.sequence

    def __len__(self) -> int:
        return self.stop - self.start

    @cached_property
    def digest(self) -> str:
        identity = f"subset 1 {ORDER} {KEY:x} {self.rows.digest} {self.start} {self.stop} of {len(self.rows)}"
        return hashlib.sha256(identity.encode()).hexdigest()[:12]

    @cached_property
    def report(self) -> RowCounts:
        """Counts of this subset. Tokens and positions are estimated from its share of all rows.

        Documents are those of all rows, because a document may have parts in both subsets.
        """
        counts = self.rows.report
        share = len(self) / len(self.rows)
        scaled = {name: round(getattr(counts, name) * share) for name in ("tokens", "positions", "learned")}
        return replace(counts, rows=len(self), **scaled)

    def take(self, indices: ArrayLike) -> Arrays:
        index = np.asarray(indices, np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        return self.rows.take(permuted(self.start + index, len(self.rows), KEY))

    def examples(self, row: int) -> list[Example]:
        return self.rows.examples(int(permuted(np.array([self.start + row]), len(self.rows), KEY)[0]))


def held_out(rows: PackedRows, share: float) -> tuple[PackedRows, PackedRows | None]:
    """Return the rows for training and the held-out rows; None if `share` is 0 or there is only one row.

    The number of held-out rows is rounded, at least one, and never all.
    """
    count = len(rows)
    held = min(count - 1, max(1, round(share * count))) if share > 0 else 0
    if held < 1:
        return rows, None
    return Subset(rows, held, count), Subset(rows, 0, held)


def packer_of(rows: PackedRows) -> PackedRows:
    """Return the rows that a subset is taken from, or the rows themselves."""
    return rows.rows if isinstance(rows, Subset) else rows
