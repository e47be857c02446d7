"""Tokenized documents in one address space, in which all documents follow each other without gaps.

An address is the number of a token, counted over all documents. Packing reads documents only through the protocol
`Documents`, whether they are in a store on disk or in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Tokens = NDArray[Any]  # uint16 or int32
Mask = NDArray[np.bool_]


class DocumentCounts(NamedTuple):
    """Counts of all documents. A store records them, so opening it does not read all borders."""

    longest: int  # tokens of the longest document
    single: int  # documents of less than two tokens
    targets: int  # tokens with a loss that are not the first of their document


class Documents(Protocol):
    """Tokenized documents. Document d is the tokens `begins(d)` .. `begins(d + 1) - 1`, with its end-of-document id."""

    def __len__(self) -> int:
        """Return the number of documents."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""

    @property
    def largest(self) -> int:
        """Largest token id of all documents."""

    @property
    def digest(self) -> str:
        """Twelve hex digits that identify all tokens, document borders and masks."""

    @property
    def masked(self) -> bool:
        """Whether some tokens have no loss, so that `read` may return a mask."""

    @property
    def counts(self) -> DocumentCounts: ...

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        """Return the address of the first token of each document. `len(self)` is allowed and gives `tokens`."""

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        """Return the document that contains each address."""

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        """Return the tokens `start` .. `stop - 1`, and a mask of those with loss; None if all have loss."""

    def read_many(self, starts: Sequence[int], stops: Sequence[int]) -> list[tuple[Tokens, Mask | None]]:
        """Return `read` of each range. Documents in a bucket fetch all ranges at the same time."""


@dataclass(frozen=True)
class InMemory:
    """Documents in memory, as two or three arrays."""

    ids: Tokens
    offsets: NDArray[np.int64]  # first token of each document, then the number of tokens
    learned: Mask | None = None  # tokens with loss; None: all

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def largest(self) -> int:
        return int(self.ids.max(initial=0))

    @cached_property
    def digest(self) -> str:
        sha256 = hashlib.sha256(self.ids.astype(np.int32).tobytes())
        sha256.update(self.offsets.tobytes())
        if self.learned is not None:
            sha256.update(self.learned.tobytes())
        return sha256.hexdigest()[:12]

    @property
    def masked(self) -> bool:
        return self.learned is not None

    @cached_property
    def counts(self) -> DocumentCounts:
        lengths = np.diff(self.offsets)
        targets = np.ones(len(self.ids), np.bool_) if self.learned is None else self.learned.copy()
        targets[self.offsets[:-1][lengths > 0]] = False
        return DocumentCounts(int(lengths.max(initial=0)), int((lengths < 2).sum()), int(targets.sum()))

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        return np.asarray(self.offsets[np.asarray(documents)])

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        return np.searchsorted(self.offsets, addresses, side="right") - 1

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        return self.ids[start:stop], None if self.learned is None else self.learned[start:stop]

    def read_many(self, starts: Sequence[int], stops: Sequence[int]) -> list[tuple[Tokens, Mask | None]]:
        return [self.read(start, stop) for start, stop in zip(starts, stops, strict=True)]


def in_memory(documents: Iterable[ArrayLike], learned: Iterable[ArrayLike] | None = None) -> InMemory:
    """Return documents from lists of token ids, which include the end-of-document ids.

    Args:
      documents: ids of each document.
      learned: for each document, which of its tokens have loss; None: all.
    """
    arrays = [np.asarray(document, np.int32) for document in documents]
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
    masks = None if learned is None else np.concatenate([np.asarray(mask, np.bool_) for mask in learned])
    return InMemory(np.concatenate([*arrays, np.zeros(0, np.int32)]), offsets, masks)
