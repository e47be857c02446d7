"""Tokenized documents laid end to end in one address space: token `a` of all tokens, document `d` of all documents.

Whatever holds documents (a store on disk, a few texts in memory) is read through `Documents`, and packing needs
nothing else of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Tokens = NDArray[Any]  # uint16 or int32
Mask = NDArray[np.bool_]


class Documents(Protocol):
    """Document d is the tokens `begins(d)` .. `begins(d + 1)`, its end-of-document id included."""

    def __len__(self) -> int:
        """Documents."""

    @property
    def tokens(self) -> int:
        """Of all documents together."""

    @property
    def largest(self) -> int:
        """The largest token id of all."""

    @property
    def digest(self) -> str:
        """Twelve hex digits of all tokens, borders and masks: the same data, the same digest."""

    @property
    def masked(self) -> bool:
        """Whether some token is not to be learned: whether `read` may give a mask."""

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        """Where documents begin; `len(self)` is allowed and gives `tokens`."""

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        """The documents that hold these tokens."""

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        """Tokens `start` .. `stop`, and which of them are to be learned; None: all of them."""


@dataclass(frozen=True)
class InMemory:
    """Documents as two or three arrays."""

    ids: Tokens
    offsets: NDArray[np.int64]  # documents + 1
    learned: Mask | None = None

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
        whole = hashlib.sha256(self.ids.astype(np.int32).tobytes())
        whole.update(self.offsets.tobytes())
        if self.learned is not None:
            whole.update(self.learned.tobytes())
        return whole.hexdigest()[:12]

    @property
    def masked(self) -> bool:
        return self.learned is not None

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        return np.asarray(self.offsets[np.asarray(documents)])

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        return np.searchsorted(self.offsets, addresses, side="right") - 1

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        return self.ids[start:stop], None if self.learned is None else self.learned[start:stop]


def in_memory(documents: Iterable[ArrayLike], learned: Iterable[ArrayLike] | None = None) -> InMemory:
    """The documents given as lists of ids, their ends included."""
    arrays = [np.asarray(document, np.int32) for document in documents]
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
    masks = None if learned is None else np.concatenate([np.asarray(mask, np.bool_) for mask in learned])
    return InMemory(np.concatenate([*arrays, np.zeros(0, np.int32)]), offsets, masks)
