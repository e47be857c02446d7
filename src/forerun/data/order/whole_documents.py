"""Rows of complete documents: each document is in one row, and a row holds several documents.

A document of n tokens takes n-1 positions: its last token is a target only. Documents of less than two tokens have no
target and are omitted. A document that is longer than a row follows the policy `too_long`. Under `split` it becomes
pieces of S positions, and the last piece is shorter. The target of a piece's last position is the document's next
token, so no target is lost. Positions start at 0 in each piece, because attention does not reach across rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Documents
from forerun.data.order.packing import VERSION, packing_order
from forerun.data.order.plan import open_or_build_plan, verify_plan
from forerun.data.order.row_layout import lay_out_rows
from forerun.data.order.rows import Arrays, Example, RowCounts
from forerun.data.order.too_long import TooLong, apply_policy
from forerun.errors import UserError


@dataclass(frozen=True)
class _Items:
    """The items of some rows, row after row."""

    each: NDArray[np.int64]  # items in each row
    documents: NDArray[np.int64]
    pieces: NDArray[np.int64]
    in_pieces: NDArray[np.bool_]  # whether the document has several pieces
    starts: NDArray[np.int64]  # address of the first token of each item
    positions: NDArray[np.int64]


class WholeDocuments:
    """Rows of complete documents, packed first-fit-decreasing.

    Args:
      documents: the documents to pack.
      sequence: positions of a row.
      too_long: what happens to documents that are longer than a row.
      plan_folder: folder in which the packing plan is stored and reused; None: the plan stays in memory.
    """

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
            raise UserError(
                "E-DATA-021",
                "data.path: too little text",
                why=f"{documents.tokens} tokens in total",
                fix="give more text",
            )
        self._plan = open_or_build_plan(documents, sequence, too_long, plan_folder)
        if not len(self):
            raise UserError(
                "E-DATA-022",
                "data.path: nothing to train on",
                why=_why_nothing(self._plan.counts),
                fix="give more text" if too_long != "drop" else "set data.too_long=split, or a longer sequence",
            )

    def __len__(self) -> int:
        return len(self._plan.starts)

    @property
    def report(self) -> RowCounts:
        return self._plan.counts

    @property
    def checked(self) -> bool:
        """Whether the plan has checksums of its blocks; plans of earlier versions of forerun have none."""
        return self._plan.checked

    def check(self) -> bool:
        """Compare the plan on disk with its checksums. Return whether it had none and they were added."""
        return verify_plan(self._plan, self._documents, self.sequence, self.too_long)

    @property
    def window(self) -> int:
        """Number of documents that are packed together."""
        return self._plan.window

    @cached_property
    def digest(self) -> str:
        identity = f"whole {VERSION} {self._documents.digest} {self.sequence} {self.too_long} {self._plan.window}"
        return hashlib.sha256(identity.encode()).hexdigest()[:12]

    def examples(self, row: int) -> list[Example]:
        found = self._items(np.array([row]))
        both = zip(found.documents.tolist(), found.pieces.tolist(), found.in_pieces.tolist(), strict=True)
        return [(document, piece) if several else (document,) for document, piece, several in both]

    def take(self, indices: ArrayLike) -> Arrays:
        found = self._items(np.asarray(indices, np.int64))
        return lay_out_rows(self._documents.read_many, found.each, found.starts, found.positions, self.sequence)

    def _items(self, index: NDArray[np.int64]) -> _Items:
        """Return the documents and pieces of the rows `index`."""
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        plan, S = self._plan, self.sequence
        first_row, first_item, full = plan.windows
        window = np.searchsorted(first_row, index, side="right") - 1
        # A row ends where the next one starts, and the last row of a window at the end of the window.
        last = index + 1 == first_row[window + 1]
        begin, after = np.split(plan.starts_at(np.concatenate([index, np.where(last, index, index + 1)])), 2)
        each = np.where(last, first_item[window + 1] - first_item[window], after) - begin
        begin += first_item[window]
        flat = np.repeat(begin - (np.cumsum(each) - each), each) + np.arange(int(each.sum()))
        document = packing_order(np.repeat(window, each) * plan.window + plan.items_at(flat), len(self._documents))
        begins, ends = self._documents.begins(np.stack([document, document + 1]))
        total = ends - begins - 1
        cut, positions = apply_policy(total, S, self.too_long)
        starts = begins + cut
        pieces = np.zeros_like(document)
        if self.too_long == "split":
            # The first `full` rows of a window hold one full piece each. A piece in any other row is the rest of its
            # document, which follows the full pieces.
            alone = np.repeat(index - first_row[window] < full[window], each)
            pieces = positions // S
            if alone.any():
                pieces[alone] = self._piece_numbers(index, window)
            starts = starts + pieces * S
            positions = np.where(alone, S, positions - pieces * S)
        return _Items(each, document, pieces, (total > S) & (self.too_long == "split"), starts, positions)

    def _piece_numbers(self, index: NDArray[np.int64], window: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each piece that fills a row, in the order of `index`.

        The rows of a document's full pieces follow each other, so a piece's number is the distance from the first one.
        """
        first_row, first_item, full = self._plan.windows
        found = []
        for r, w in zip((index - first_row[window]).tolist(), window.tolist(), strict=True):
            if r < full[w]:
                own = self._plan.items_at(np.arange(first_item[w], first_item[w] + full[w]))
                found.append(r - int(np.searchsorted(own, own[r])))
        return np.array(found, np.int64)


def _why_nothing(counts: RowCounts) -> str:
    dropped = f", {counts.dropped} of them longer than the sequence and dropped" if counts.dropped else ""
    return f"{counts.documents} documents of {counts.tokens} tokens in total{dropped}"
