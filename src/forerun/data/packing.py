"""Concatenate and split: the token stream is cut into rows of one length, and no token is lost.

Row r holds the stream's tokens r*S .. r*S+S-1; the target of each is the token after it, so the last target of a
row is the first token of the next. Every token but a document's first is the target of exactly one weighted
position. At the end of a document the target would be another document's first token: its weight is 0. A document
that crosses a row border is two parts: in the next row it is a new segment whose positions start at 0, because
attention does not reach across rows. The last row is filled up with padding (segment 0, weight 0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.stream import Stream
from forerun.errors import UserError


class Rows:
    """The rows of a stream, built only when taken; `recognised` says what the stream was read from."""

    def __init__(self, stream: Stream, sequence: int, recognised: str = "") -> None:
        self.stream, self.sequence, self.recognised = stream, sequence, recognised
        self._count = -(-(len(stream.tokens) - 1) // sequence)  # the last token is a target only
        if self._count < 1:
            raise UserError(
                "data.path: too little text", why=f"{len(stream.tokens)} tokens in all", fix="give more text"
            )

    def __len__(self) -> int:
        return self._count

    @property
    def documents(self) -> int:
        return self.stream.documents

    @property
    def tokens(self) -> int:
        """All tokens, the document ends included."""
        return len(self.stream.tokens)

    @property
    def padding_share(self) -> float:
        """Share of all positions that hold no token."""
        return max(0, len(self) * self.sequence - self.tokens) / (len(self) * self.sequence)

    def take(self, indices: ArrayLike) -> dict[str, NDArray[Any]]:
        """Rows `indices` [n] as five arrays [n, S], named as the fields of `Batch`."""
        index = np.asarray(indices, np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        start = index[:, None] * self.sequence
        at = start + np.arange(self.sequence + 1)
        document = np.searchsorted(self.stream.offsets, at, side="right") - 1
        inside = at < self.tokens
        tokens = np.take(self.stream.tokens, at, mode="clip").astype(np.int32)
        here, real = document[:, :-1], inside[:, :-1]
        same = inside[:, 1:] & (here == document[:, 1:])
        begin = np.maximum(self.stream.offsets[here], start)
        return {
            "tokens": np.where(real, tokens[:, :-1], 0),
            "targets": np.where(inside[:, 1:], tokens[:, 1:], 0),
            "weights": same.astype(np.float32),
            "segments": np.where(real, here - document[:, :1] + 1, 0).astype(np.int32),
            "positions": np.where(real, at[:, :-1] - begin, 0).astype(np.int32),
        }
