"""Rows of concatenated documents: all documents follow each other and are cut into rows, so no token is lost.

Row r holds the tokens r*S .. r*S+S-1 of all documents. The target of each is the token after it, so the last target of
a row is the first token of the next row. Every token except the first of a document is the target of exactly one
position. At the end of a document, the target would be the first token of the next document. Its weight is 0, as for
targets without loss.

A document that crosses a row border has two pieces. In the next row it is a new segment whose positions start at 0,
because attention does not reach across rows. The last row is filled up with padding.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Documents
from forerun.data.order.rows import Arrays, Example, RowCounts
from forerun.errors import UserError


class Concatenated:
    """Rows of `sequence` positions, cut from the concatenated documents."""

    def __init__(self, documents: Documents, sequence: int) -> None:
        self._documents, self.sequence = documents, sequence
        self._count = -(-(documents.tokens - 1) // sequence)  # the last token is a target only
        if self._count < 1:
            raise UserError(
                "E-DATA-012",
                "data.path: too little text",
                why=f"{documents.tokens} tokens in total",
                fix="give more text",
            )

    def __len__(self) -> int:
        return self._count

    @cached_property
    def digest(self) -> str:
        identity = f"concatenated 1 {self._documents.digest} {self.sequence}"
        return hashlib.sha256(identity.encode()).hexdigest()[:12]

    @cached_property
    def report(self) -> RowCounts:
        """Counts of the documents. `too_long` is 0, because no index has this count: `count_too_long` returns it."""
        documents, counts = self._documents, self._documents.counts
        return RowCounts(
            documents=len(documents),
            tokens=documents.tokens,
            rows=len(self),
            sequence=self.sequence,
            positions=min(documents.tokens, len(self) * self.sequence),
            learned=counts.targets,
            longest=max(counts.longest - 1, 0),
            nothing_to_learn=counts.single,
        )

    def count_too_long(self) -> int:
        """Return the number of documents with more positions than a row. It may read all document borders."""
        if self.report.longest <= self.sequence:
            return 0
        count, chunk = len(self._documents), 1 << 21
        borders = (self._documents.begins(np.arange(n, min(n + chunk, count) + 1)) for n in range(0, count, chunk))
        return sum(int((np.diff(begins) - 1 > self.sequence).sum()) for begins in borders)

    def examples(self, row: int) -> list[Example]:
        start = row * self.sequence
        first, last = self._documents.holding([start, min(start + self.sequence, self._documents.tokens) - 1]).tolist()
        begins = self._documents.begins(np.arange(first, last + 2))
        from_row = begins[:-1] // self.sequence
        to_row = np.minimum((begins[1:] - 1) // self.sequence, len(self) - 1)
        both = zip(range(first, last + 1), from_row.tolist(), to_row.tolist(), np.diff(begins).tolist(), strict=True)
        return [(d,) if a == b else (d, row - a) for d, a, b, tokens in both if tokens]

    def take(self, indices: ArrayLike) -> Arrays:
        index = np.asarray(indices, np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        S, end = self.sequence, self._documents.tokens
        starts = index * S
        stops = np.minimum(starts + S + 1, end)
        tokens = np.zeros((len(index), S + 1), np.int32)
        learned = np.ones((len(index), S + 1), np.bool_)
        for i, (ids, mask) in enumerate(self._documents.read_many(starts.tolist(), stops.tolist())):
            tokens[i, : len(ids)] = ids
            if mask is not None:
                learned[i, : len(ids)] = mask
        begin = self._begins(starts, stops)
        inside = np.arange(S + 1) < (stops - starts)[:, None]
        real = inside[:, :-1]
        column = np.arange(S, dtype=np.int32)
        since = np.maximum.accumulate(np.where(begin[:, :-1], column, 0), axis=1)
        return {
            "tokens": np.ascontiguousarray(tokens[:, :-1]),
            "targets": np.ascontiguousarray(tokens[:, 1:]),
            "weights": (inside[:, 1:] & ~begin[:, 1:] & learned[:, 1:]).astype(np.float32),
            "segments": np.where(real, np.cumsum(begin[:, :-1], axis=1, dtype=np.int32), 0),
            "positions": np.where(real, column - since, 0).astype(np.int32),
        }

    def _begins(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return where a document, or a row's piece of one, begins [n, S + 1]."""
        begin = np.zeros((len(starts), self.sequence + 1), np.bool_)
        begin[:, 0] = True
        first, last = self._documents.holding(np.stack([starts, stops - 1]))
        each = last - first  # documents that begin inside the row
        row = np.repeat(np.arange(len(starts)), each)
        document = np.repeat(first + 1 - (np.cumsum(each) - each), each) + np.arange(int(each.sum()))
        begin[row, self._documents.begins(document) - starts[row]] = True
        return begin
