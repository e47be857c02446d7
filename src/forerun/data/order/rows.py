"""Rows of one length, packed from documents: what every packer gives, and the figures it reports.

A row is five arrays of length S, named as the fields of `Batch`. Segments number a row's documents from 1, positions
count from 0 inside each; segment 0 is padding, and its weight is 0. A weight is 1 where the target is a token of the
same document that is to be learned.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

from numpy.typing import ArrayLike, NDArray

FIELDS = ("tokens", "targets", "weights", "segments", "positions")

Arrays: TypeAlias = dict[str, NDArray[Any]]
Example: TypeAlias = tuple[int, ...]  # (document,), or (document, piece) where a document takes part in several rows


@dataclass(frozen=True)
class Counts:
    """What became of the documents."""

    documents: int
    tokens: int  # of all documents, before anything is left out
    rows: int
    sequence: int
    positions: int  # that hold a token
    learned: int  # positions whose target counts towards the loss
    too_long: int = 0  # documents of more positions than a row
    became: str = "split"  # what these became: the policy
    longest: int = 0  # positions of the longest document
    dropped: int = 0  # documents left out because they are too long
    truncated_tokens: int = 0  # tokens cut off or left out with their document
    nothing_to_learn: int = 0  # documents of less than two tokens, left out

    @property
    def padding_share(self) -> float:
        """Share of all positions that hold no token."""
        return 1 - self.positions / (self.rows * self.sequence)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PackedRows(Protocol):
    """Rows of `sequence` positions, built only when taken."""

    @property
    def sequence(self) -> int: ...

    @property
    def digest(self) -> str:
        """Twelve hex digits of the documents and the packing: the same digest, the same rows."""

    @property
    def report(self) -> Counts: ...

    def __len__(self) -> int:
        """Rows."""

    def take(self, indices: ArrayLike) -> Arrays:
        """Rows `indices` [n] as five arrays [n, S]: int32, weights float32."""

    def examples(self, row: int) -> list[Example]:
        """The documents of a row, in order."""
