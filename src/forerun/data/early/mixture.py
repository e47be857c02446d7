"""The mixture of a job that starts early: the parts have windows, and weights apply as in a usual mixture.

Without weights, all parts share their windows. With weights, each part has its own windows, because weights determine
how fast a part is used: use c of a part is place c of that part's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.early.stream import WindowStream
from forerun.data.order.mixture import BLOCK, Mixture, places_of
from forerun.data.order.permutation import ORDER
from forerun.data.order.rows import Arrays, Example

STREAM_BITS = 44  # a row number is the number of its stream and the row in it


class EarlyMixture(Mixture):
    """The rows of all parts in one order. Rows of windows that do not exist yet are waited for when they are due.

    Args:
      streams: the rows: one stream for all parts, or one per part if there are weights.
      weights: relative frequency of each part's rows, or None.
      names: names of the parts.
      sequence: positions of a row.
      digest: identifies the data and the order.
      raise_failure: raises the error of a build that failed.
    """

    def __init__(
        self,
        streams: Sequence[WindowStream],
        weights: Sequence[float] | None,
        names: Sequence[str],
        *,
        sequence: int,
        digest: str,
        raise_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.parts, self.names, self.extra = (), tuple(names), None
        self.block_orders = []
        self._streams, self._sequence = tuple(streams), sequence
        self._places = None if weights is None else places_of(weights, self.names)
        self.digest = digest
        self._raise_failure = raise_failure

    def __len__(self) -> int:
        """Return the number of rows of all parts. Wait until all units exist."""
        return sum(stream.known_rows() for stream in self._streams)

    def known_rows(self, wanted: int) -> int:
        """Return the number of known rows. Wait until there are `wanted` rows or all rows are known."""
        found = 0
        for stream in self._streams:
            found += stream.known_rows(max(1, wanted - found))
        return found

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def order(self) -> str:
        return f"{ORDER} early"

    @property
    def epoch(self) -> int | None:
        """Number of rows in an epoch, or None as long as some units do not exist."""
        if not all(stream.is_known for stream in self._streams):
            return None
        counts = [stream.known_rows() for stream in self._streams]
        if self._places is None:
            return sum(counts)
        return max(-(-count * BLOCK // places) for count, places in zip(counts, self._places, strict=True))

    @property
    def passes(self) -> list[float]:
        """How often each part is used in an epoch. Wait until all units exist."""
        if self._places is None:
            return [1.0] * len(self.names)
        counts = [stream.known_rows() for stream in self._streams]
        epoch = self.epoch or 0
        return [epoch * places / BLOCK / count for count, places in zip(counts, self._places, strict=True)]

    def numbered(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Return the numbers of these rows of all rows. Wait until all units exist."""
        at = np.asarray(rows, np.int64)
        firsts = np.cumsum([0, *(stream.known_rows() for stream in self._streams)])
        stream = np.searchsorted(firsts, at, side="right") - 1
        return (stream << STREAM_BITS) + at - firsts[stream]

    def drawn(self, places: ArrayLike, seed: int) -> NDArray[np.int64]:
        """Return the row numbers at these places of the endless order of `seed`. Wait for their windows."""
        self._raise_failure()
        at = np.asarray(places, np.int64)
        if self._places is None:
            return self._streams[0].drawn(at, seed)
        part, use = self._uses(at, seed)
        rows = np.empty_like(at)
        for p in np.unique(part).tolist():
            here = part == p
            rows[here] = (p << STREAM_BITS) + self._streams[p].drawn(use[here], seed)
        return rows

    def _taken(self, index: NDArray[np.int64]) -> Arrays:
        streams, rows = np.divmod(index, 1 << STREAM_BITS)
        out: Arrays = {}
        for s in np.unique(streams).tolist():
            here = streams == s
            for name, array in self._streams[s].take(rows[here]).items():
                out.setdefault(name, np.empty((len(index), *array.shape[1:]), array.dtype))[here] = array
        return out

    def examples(self, row: int) -> list[Example]:
        """Return the examples of a row: (part, document) or (part, document, piece)."""
        stream, inside = divmod(row, 1 << STREAM_BITS)
        return self._streams[stream].examples(inside)
