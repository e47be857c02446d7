"""Subsets of the rows of a source, chosen by a fixed permutation: rows held out for validation, and the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from forerun.data.order.permutation import ORDER, permuted
from forerun.data.order.rows import Arrays, Example, PackedRows, RowCounts
from forerun.errors import UserError

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


# ---- The held-out share of the data, compared with the share that the job asks for ----


FAR = 2.0  # a share this many times larger or smaller than the job's is reported


@dataclass(frozen=True)
class HeldOut:
    """The data that is held out for validation: `held` of `count` items, which have `share` of the tokens."""

    wanted: float  # the share that the job asks for
    by: str  # what is counted: documents, rows or pairs
    held: int
    count: int
    share: float

    @property
    def is_far(self) -> bool:
        """Whether the share is far from the one that the job asks for."""
        return not self.wanted / FAR <= self.share <= self.wanted * FAR

    def __str__(self) -> str:
        """Return for example `1 of 3 documents, 35.2 % of the tokens; the job asks for 2 %`."""
        return f"{self.number}, {self.asked}"

    @property
    def number(self) -> str:
        return f"{self.held:,} of {self.count:,} {self.by}"

    @property
    def asked(self) -> str:
        return f"{100 * self.share:.3g} % of the tokens; the job asks for {100 * self.wanted:.3g} %"

    @property
    def counted(self) -> str:
        return f"{self.number}, {100 * self.share:.3g} % of the tokens"

    @property
    def warning(self) -> str:
        """A warning with both shares, the cause of the difference, and the key that gives an exact share."""
        what = f"data.validation={self.wanted:g} asks for {100 * self.wanted:.3g} %, but {self.counted} are held out"
        if self.by == "rows":
            return f"{what}: there are too few rows for that share; use more data or a shorter sequence"
        why = f"complete {self.by} are held out by their hash, and there are too few for an exact share"
        exact = "" if self.by == "pairs" else "; data.validation_by=rows holds out an exact share of the packed rows"
        return f"{what}: {why}{exact}"


def require_held_out(parts: Sequence[HeldOut], rows: int) -> None:
    """Raise UserError unless something of the parts is held out. `rows` is the number of packed rows of all parts."""
    if any(part.held for part in parts):
        return
    first, count = parts[0], sum(part.count for part in parts)
    more = "use more data, or data.validation=0 for no validation"
    by_rows = first.by == "documents" and rows > 1
    raise UserError(
        "E-DATA-226",
        f"data.validation={first.wanted:g} holds out nothing",
        why=f"it chooses each of the {count:,} {first.by} by its hash, and chose none"
        if first.by != "rows"
        else f"the data has {count:,} packed row{'s' if count > 1 else ''}, and at least one remains for training",
        fix=f"data.validation_by=rows holds out an exact share of the {rows:,} packed rows; or {more}"
        if by_rows
        else more,
    )
