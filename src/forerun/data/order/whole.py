"""Whole documents in rows: first-fit-decreasing, each document in one row, several to a row.

A document of n tokens takes n-1 positions: its last token is a target only. Documents of less than two tokens have
nothing to learn and are left out. One that is longer than a row follows `too_long`:

- split: pieces of S positions, the last one shorter. The target of a piece's last position is the document's next
  token, so nothing is lost; positions start at 0 in each piece, because attention does not reach across rows.
- keep_start, keep_end: its first or its last S positions.
- drop: it is left out. stop: an error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Documents
from forerun.data.order.laid import laid
from forerun.data.order.permutation import permuted
from forerun.data.order.plan import KEY, VERSION, TooLong, check_plan, kept_part, planned
from forerun.data.order.rows import Arrays, Counts, Example
from forerun.errors import UserError


@dataclass(frozen=True)
class _Items:
    """The items of some rows, row after row."""

    each: NDArray[np.int64]  # items in each row
    documents: NDArray[np.int64]
    pieces: NDArray[np.int64]
    in_pieces: NDArray[np.bool_]  # whether the document has several
    starts: NDArray[np.int64]  # the first token of each
    positions: NDArray[np.int64]


class Whole:
    """Rows of whole documents. The plan is kept in `plan_folder` and reused from there; None: in memory."""

    def __init__(
        self,
        documents: Documents,
        sequence: int,
        *,
        too_long: TooLong = "split",
        plan_folder: Path | None = None,
    ) -> None:
        self._documents, self.sequence, self.too_long = documents, sequence, too_long
        if documents.tokens < 2:
            raise UserError("data.path: too little text", why=f"{documents.tokens} tokens in all", fix="give more text")
        self._plan = planned(documents, sequence, too_long, plan_folder)
        if not len(self):
            raise UserError(
                "data.path: nothing to learn",
                why=_why_nothing(self._plan.counts),
                fix="give more text" if too_long != "drop" else "data.too_long=split, or a longer sequence",
            )

    def __len__(self) -> int:
        return len(self._plan.starts)

    @property
    def report(self) -> Counts:
        return self._plan.counts

    @property
    def checked(self) -> bool:
        """Whether the plan has checksums of its blocks; plans of earlier versions of forerun have none."""
        return self._plan.checked

    def check(self) -> bool:
        """Compare the plan on disk with its checksums; return whether it lacked them and got some."""
        return check_plan(self._plan, self._documents, self.sequence, self.too_long)

    @property
    def window(self) -> int:
        """Documents that are packed together."""
        return self._plan.window

    @cached_property
    def digest(self) -> str:
        said = f"whole {VERSION} {self._documents.digest} {self.sequence} {self.too_long} {self._plan.window}"
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    def examples(self, row: int) -> list[Example]:
        found = self._items(np.array([row]))
        both = zip(found.documents.tolist(), found.pieces.tolist(), found.in_pieces.tolist(), strict=True)
        return [(document, piece) if several else (document,) for document, piece, several in both]

    def take(self, indices: ArrayLike) -> Arrays:
        found = self._items(np.asarray(indices, np.int64))
        return laid(self._documents.read, found.each, found.starts, found.positions, self.sequence)

    def _items(self, index: NDArray[np.int64]) -> _Items:
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        plan, S = self._plan, self.sequence
        first_row, first_item, full = plan.windows
        window = np.searchsorted(first_row, index, side="right") - 1
        last = index + 1 == first_row[window + 1]
        begin, after = np.split(plan.starts_at(np.concatenate([index, np.where(last, index, index + 1)])), 2)
        each = np.where(last, first_item[window + 1] - first_item[window], after) - begin
        begin += first_item[window]
        flat = np.repeat(begin - (np.cumsum(each) - each), each) + np.arange(int(each.sum()))
        document = permuted(np.repeat(window, each) * plan.window + plan.items_at(flat), len(self._documents), KEY)
        begins, ends = self._documents.begins(np.stack([document, document + 1]))
        total = ends - begins - 1
        starts, positions = kept_part(begins, total, S, self.too_long)
        pieces = np.zeros_like(document)
        if self.too_long == "split":
            alone = np.repeat(index - first_row[window] < full[window], each)
            pieces = positions // S
            if alone.any():
                pieces[alone] = self._piece_of(index, window)
            starts = starts + pieces * S
            positions = np.where(alone, S, positions - pieces * S)
        return _Items(each, document, pieces, (total > S) & (self.too_long == "split"), starts, positions)

    def _piece_of(self, index: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the rows that one piece fills: which piece. They come ordered by document and piece."""
        first_row, first_item, full = self._plan.windows
        found = []
        for r, w in zip((index - first_row[window]).tolist(), window.tolist(), strict=True):
            if r < full[w]:
                own = self._plan.items_at(np.arange(first_item[w], first_item[w] + full[w]))
                found.append(r - int(np.searchsorted(own, own[r])))
        return np.array(found, np.int64)


def _why_nothing(counts: Counts) -> str:
    dropped = f", {counts.dropped} of them longer than the sequence and dropped" if counts.dropped else ""
    return f"{counts.documents} documents of {counts.tokens} tokens in all{dropped}"
