"""Packed rows: the protocol of all packers, the counts that they report, and the layout of rows.

A row is five arrays of length S, named as the fields of `Batch`. Segments number the documents of a row from 1, and
positions count from 0 inside each document. Segment 0 is padding, and its weight is 0. A weight is 1 if the target is a
token of the same document that has loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Documents, Mask, Tokens

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


# ---- The layout of rows: from segments of documents to the five arrays that a packer returns ----


def lay_out_rows(
    read_many: Callable[[Sequence[int], Sequence[int]], list[tuple[Tokens, Mask | None]]],
    each: NDArray[np.int64],
    starts: NDArray[np.int64],
    positions: NDArray[np.int64],
    sequence: int,
) -> Arrays:
    """Return the five arrays of n rows.

    Args:
      read_many: returns the tokens from each address to another, and their masks (`Documents.read_many`).
      each: number of segments in each row [n].
      starts: address of the first token of each segment, row after row.
      positions: number of positions of each segment. The target of a position is the token after its input.
      sequence: positions of a row; those after the last segment are padding.
    """
    parts = read_many(starts.tolist(), (starts + positions + 1).tolist())
    flat = np.concatenate([tokens for tokens, _ in parts] or [np.zeros(0, np.int32)])
    # A segment of n positions reads n + 1 tokens: all but its last are inputs, all but its first are targets.
    ends = np.cumsum(positions + 1)
    inputs, targets = np.ones(len(flat), np.bool_), np.ones(len(flat), np.bool_)
    inputs[ends - 1] = False
    targets[ends - positions - 1] = False
    number = np.arange(len(positions)) - np.repeat(np.cumsum(each) - each, each) + 1
    owner = np.repeat(np.arange(len(each)), each)
    used = np.bincount(owner, positions, len(each)).astype(np.int64)
    filled = np.arange(sequence) < used[:, None]
    begins = np.cumsum(positions) - positions
    out: Arrays = {name: np.zeros((len(each), sequence), np.int32) for name in ("tokens", "targets")}
    out["tokens"][filled] = flat[inputs]
    out["targets"][filled] = flat[targets]
    if any(mask is not None for _, mask in parts):
        learned = np.concatenate([np.ones(len(t), np.bool_) if mask is None else mask for t, mask in parts])
        out["weights"] = np.zeros((len(each), sequence), np.float32)
        out["weights"][filled] = learned[targets]
    else:
        out["weights"] = filled.astype(np.float32)
    out["segments"] = np.zeros((len(each), sequence), np.int32)
    out["segments"][filled] = np.repeat(number, positions)
    out["positions"] = np.zeros((len(each), sequence), np.int32)
    out["positions"][filled] = np.arange(int(positions.sum())) - np.repeat(begins, positions)
    return out
