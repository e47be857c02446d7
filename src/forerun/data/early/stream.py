"""The rows of a list of windows in an endless order, of which the beginning is known before all windows exist.

In the first pass, the rows of window 0 come first, then those of window 1, and so on. Rows are packed within a window
and permuted within it. In later passes, all rows are permuted together, as without windows.

The number of rows of a window is known when its units exist. The row at a place of the first pass therefore depends
only on the windows up to it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.data.early.windows import UnitRange, Window
from forerun.data.order.permutation import permuted
from forerun.data.order.rows import Arrays, Example, NoRowsError, PackedRows

FIRST_PASS = 0xEA51  # key of the permutations within windows, which differ from those of complete passes
OPEN_RANGES = 64  # each holds open files


class OpenRange(NamedTuple):
    """The packed rows of a range of units, and the number of documents of its part before them."""

    rows: PackedRows
    documents_before: int


Opener = Callable[[UnitRange], OpenRange]


class WindowStream:
    """The rows of some windows, numbered from window to window. All methods may be called by several threads.

    Args:
      windows: the windows in order.
      opener: waits for the units of a range, and returns their packed rows. It raises NoRowsError if they have none.
      key: integers that distinguish this stream from others of the same job.
    """

    def __init__(self, windows: Sequence[Window], opener: Opener, key: tuple[int, ...] = ()) -> None:
        self._windows, self._opener, self._key = list(windows), opener, key
        self._ranges = [units for window in windows for units in window]
        self._window_firsts = [0]  # first row of each known window, then the number of known rows
        self._range_firsts = [0]  # the same for ranges
        self._nothing: NoRowsError | None = None
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, OpenRange | None] = OrderedDict()
        self._open_lock = threading.Lock()

    @property
    def is_known(self) -> bool:
        """Whether the rows of all windows are counted."""
        return len(self._window_firsts) > len(self._windows)

    def known_rows(self, wanted: int | None = None) -> int:
        """Return the number of known rows. Wait for windows until there are `wanted` rows, or all (None).

        Raises:
          NoRowsError: all windows are known, and they have no row.
        """
        while not self.is_known and (wanted is None or self._window_firsts[-1] < wanted):
            self._count_next()
        if self.is_known and not self._window_firsts[-1]:
            assert self._nothing is not None
            raise self._nothing
        return self._window_firsts[-1]

    def drawn(self, uses: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the row numbers at these places of the endless order. Wait for their windows."""
        known = self.known_rows(int(uses.max(initial=0)) + 1)
        rows = np.empty_like(uses)
        firsts = np.asarray(self._window_firsts, np.int64)
        first_pass = uses < known
        window = np.searchsorted(firsts, uses, side="right") - 1
        for number in np.unique(window[first_pass]).tolist():
            here = first_pass & (window == number)
            begin, count = int(firsts[number]), int(firsts[number + 1] - firsts[number])
            key = (seed, *self._key, FIRST_PASS, number)
            rows[here] = begin + permuted(uses[here] - begin, count, *key)
        passes, inside = np.divmod(uses, known)
        for number in np.unique(passes[~first_pass]).tolist():
            here = passes == number
            rows[here] = permuted(inside[here], known, seed, *self._key, number)
        return rows

    def take(self, rows: NDArray[np.int64]) -> Arrays:
        """Return rows by their numbers, as arrays [n, S]."""
        held, firsts = self._places(rows)
        out: Arrays = {}
        for number in np.unique(held).tolist():
            here = held == number
            for name, array in self._open(number).rows.take(rows[here] - firsts[number]).items():
                out.setdefault(name, np.empty((len(rows), *array.shape[1:]), array.dtype))[here] = array
        return out

    def examples(self, row: int) -> list[Example]:
        """Return the examples of a row: (part, document) or (part, document, piece)."""
        held, firsts = self._places(np.array([row]))
        number = int(held[0])
        units, found = self._ranges[number], self._open(number)
        examples = found.rows.examples(row - int(firsts[number]))
        return [(units.part, found.documents_before + document, *piece) for document, *piece in examples]

    def _places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the range of units that holds each row, and the first rows of all known ranges."""
        firsts = np.asarray(self._range_firsts, np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < firsts[-1]):
            raise IndexError(f"row {rows.min()} .. {rows.max()} of {firsts[-1]}")
        return np.searchsorted(firsts, rows, side="right") - 1, firsts

    def _count_next(self) -> None:
        """Open the next window and count its rows."""
        with self._lock:
            if self.is_known:  # another thread counted the last one
                return
            for _ in self._windows[len(self._window_firsts) - 1]:
                number = len(self._range_firsts) - 1
                found = self._opened_range(number)
                self._range_firsts.append(self._range_firsts[-1] + (0 if found is None else len(found.rows)))
            self._window_firsts.append(self._range_firsts[-1])

    def _open(self, number: int) -> OpenRange:
        found = self._opened_range(number)
        assert found is not None, "a range without rows holds no row"
        return found

    def _opened_range(self, number: int) -> OpenRange | None:
        """Return a range, or None if it has no rows. The OPEN_RANGES ranges that were used last stay open."""
        with self._open_lock:
            if number in self._opened:
                self._opened.move_to_end(number)
                return self._opened[number]
        try:
            found: OpenRange | None = self._opener(self._ranges[number])
        except NoRowsError as error:
            self._nothing, found = self._nothing or error, None
        with self._open_lock:
            self._opened[number] = found
            if len(self._opened) > OPEN_RANGES:
                self._opened.popitem(last=False)
        return found
