"""Some of the rows of a source, chosen by a fixed permutation: the rows held out for validation, and the others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from forerun.data.order.permutation import ORDER, permuted
from forerun.data.order.rows import Arrays, Counts, Example, PackedRows

KEY = 0x5EED_0FF5E7  # fixed: every job with the same rows holds out the same ones, whatever its seed


@dataclass(frozen=True)
class Subset:
    """Rows number `start` .. `stop` of all rows in permuted order. Nothing is kept per row."""

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
        said = f"subset 1 {ORDER} {KEY:x} {self.rows.digest} {self.start} {self.stop} of {len(self.rows)}"
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @cached_property
    def report(self) -> Counts:
        """Return the counts of all rows, where those of tokens and positions are this subset's share of them.

        A document may have parts on both sides, so the documents are those of all rows.
        """
        whole = self.rows.report
        share = len(self) / len(self.rows)
        scaled = {name: round(getattr(whole, name) * share) for name in ("tokens", "positions", "learned")}
        return replace(whole, rows=len(self), **scaled)

    def take(self, indices: ArrayLike) -> Arrays:
        index = np.asarray(indices, np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        return self.rows.take(permuted(self.start + index, len(self.rows), KEY))

    def examples(self, row: int) -> list[Example]:
        return self.rows.examples(int(permuted(np.array([self.start + row]), len(self.rows), KEY)[0]))


def held_out(rows: PackedRows, share: float) -> tuple[PackedRows, PackedRows | None]:
    """Return the rows to train on and those held out: the nearest whole number, but one at least and never all."""
    count = len(rows)
    held = min(count - 1, max(1, round(share * count))) if share > 0 else 0
    if held < 1:
        return rows, None
    return Subset(rows, held, count), Subset(rows, 0, held)


def packer_of(rows: PackedRows) -> PackedRows:
    """Return the rows that a subset is taken from, or the rows themselves."""
    return rows.rows if isinstance(rows, Subset) else rows
