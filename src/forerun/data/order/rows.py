"""Packed rows: the protocol of all packers, and the counts that they report.

A row is five arrays of length S, named as the fields of `Batch`. Segments number the documents of a row from 1, and
positions count from 0 inside each document. Segment 0 is padding, and its weight is 0. A weight is 1 if the target is a
token of the same document that has loss.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Documents

FIELDS = ("tokens", "targets", "weights", "segments", "positions")

Arrays: TypeAlias = dict[str, NDArray[Any]]
Example: TypeAlias = tuple[int, ...]  # (document,), or (document, piece) where a document takes part in several rows


@dataclass(frozen=True)
class RowCounts:
    """Counts of packed documents."""

    documents: int
    tokens: int  # of all documents, including omitted ones
    rows: int
    sequence: int
    positions: int  # positions that hold a token
    learned: int  # positions whose target has loss
    too_long: int = 0  # documents with more positions than a row
    became: str = "split"  # policy that was applied to documents that are too long
    longest: int = 0  # positions of the longest document
    dropped: int = 0  # documents omitted because they are too long
    truncated_tokens: int = 0  # tokens cut off, or omitted with their document
    nothing_to_learn: int = 0  # documents of less than two tokens, which are omitted

    @property
    def padding_share(self) -> float:
        """Share of positions that hold no token."""
        return 1 - self.positions / (self.rows * self.sequence)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PackedRows(Protocol):
    """Rows of `sequence` positions, which are built when they are taken."""

    @property
    def sequence(self) -> int: ...

    @property
    def digest(self) -> str:
        """Twelve hex digits of the documents and the packing. Rows with the same digest are equal."""

    @property
    def report(self) -> RowCounts: ...

    def __len__(self) -> int:
        """Return the number of rows."""

    def take(self, indices: ArrayLike) -> Arrays:
        """Return the rows `indices` [n] as five arrays [n, S]. Weights are float32, the others int32."""

    def examples(self, row: int) -> list[Example]:
        """Return the documents of a row, in order."""


def count_loss_targets(documents: Documents, starts: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """Return the number of targets with loss. Targets are the `positions` tokens after each start; starts ascend."""
    if not documents.masked:
        return int(positions.sum())
    found = 0
    some = max(1, (1 << 24) * len(documents) // documents.tokens)  # about 16M tokens at a time
    for i in range(0, len(starts), some):
        begin, size = starts[i : i + some], positions[i : i + some]
        mask = documents.read(int(begin[0]), int(begin[-1] + size[-1] + 1))[1]
        if mask is None:
            found += int(size.sum())
            continue
        sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        at = begin - begin[0] + 1
        end = len(sums) - 1  # an empty document at the very end would begin beyond it
        found += int((sums[np.minimum(at + size, end)] - sums[np.minimum(at, end)]).sum())
    return found
