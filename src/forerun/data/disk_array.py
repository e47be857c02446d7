"""Flat arrays in files, of which only the requested ranges are read.

A memory map is not used, for two reasons:

- Pages of a map that a run has touched count as its memory until it ends. With large pages in the page cache, that is
  2 MB for every number that is read.
- If a mapped file is truncated, the process is killed without a message. Here a short read is an error that names the
  file.

An array is read in complete blocks. Each block is compared before its numbers are used (`blocks.py`).
"""

from __future__ import annotations

import itertools
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.blocks import BLOCK_BYTES, Blocks, damage

STRIDE = 1 << 12  # numbers between two entries of the index of a sorted array
SPAN_BLOCKS = 1 << 10  # limit of one read for scattered numbers: 4 MiB
RESIDENT_BYTES = 1 << 16  # a file of at most this size is read once and kept in memory


class DiskArray:
    """A flat array in a file. It is pickled as the name of the file, without its content.

    Args:
      file: the file, which contains nothing but the array.
      dtype: type of the numbers.
      root: authenticates the checksums of the file.
      resident_bytes: a file of at most this size is read once, compared, and kept in memory.
    """

    def __init__(self, file: Path, dtype: np.dtype[Any], root: str, resident_bytes: int = RESIDENT_BYTES) -> None:
        self.file, self.dtype = file, np.dtype(dtype)
        self._bytes = file.stat().st_size
        self._itemsize = self.dtype.itemsize
        self._size = self._bytes // self._itemsize
        self._blocks = Blocks(file, root)
        self._resident_bytes = resident_bytes
        self._resident: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self._size

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskArray, (self.file, self.dtype, self._blocks.root, self._resident_bytes)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the numbers `start` .. `stop - 1` as a read-only array."""
        if self._bytes <= self._resident_bytes:
            return self._all()[start:stop]
        return self._read(start, stop)

    def _all(self) -> NDArray[Any]:
        if self._resident is None:
            self._resident = self._read(0, self._size)
        return self._resident

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        # Feeds spend most of their reading time here, so this makes few calls and does little arithmetic.
        if start == stop:
            return np.zeros(0, self.dtype)
        begin, end = start * self._itemsize, stop * self._itemsize
        block = begin // BLOCK_BYTES
        first = block * BLOCK_BYTES
        size = ((end - 1) // BLOCK_BYTES - block + 1) * BLOCK_BYTES
        raw = os.pread(self._descriptor, size, first)
        if len(raw) != size:  # at the end of the file, or cut at 2 GiB
            raw = self._raw(first, min(size, self._bytes - first))
        self._blocks.require(raw, block)
        return np.frombuffer(raw, self.dtype, stop - start, begin - first)

    def _raw(self, start: int, size: int) -> bytes:
        """Return `size` bytes of the file, from `start` on. Raise UserError if the file ends before."""
        raw = os.pread(self._descriptor, size, start)
        while len(raw) < size:  # a read is cut at 2 GiB
            more = os.pread(self._descriptor, size - len(raw), start + len(raw))
            if not more:
                raise damage(self.file, f"it ends before byte {start + size}: it was cut short")
            raw += more
        return raw

    def at(self, places: ArrayLike) -> NDArray[Any]:
        """Return the numbers at `places` [n], in any order. Each block is read and compared once."""
        at = np.asarray(places, np.int64)
        if self._bytes <= self._resident_bytes:
            return self._all()[at]
        if not len(at):
            return np.zeros(0, self.dtype)
        per_block = BLOCK_BYTES // self._itemsize
        if len(at) == 1:
            return self._read(int(at[0]), int(at[0]) + 1)
        order = np.argsort(at, kind="stable")
        ascending = at[order]
        blocks = ascending // per_block
        steps = blocks[1:] - blocks[:-1]
        apart = (steps > 1) | ((steps == 1) & (blocks[1:] % SPAN_BLOCKS == 0))
        borders = [0, *(apart.nonzero()[0] + 1).tolist(), len(at)]
        found = np.empty(len(at), self.dtype)
        for a, b in itertools.pairwise(borders):
            start = int(ascending[a])
            found[order[a:b]] = self._read(start, int(ascending[b - 1]) + 1)[ascending[a:b] - start]
        return found

    def places_of(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return `np.searchsorted(self, values, side="right")`. The array must be sorted."""
        wanted = np.asarray(values)
        if self._bytes <= self._resident_bytes:
            return np.searchsorted(self._all(), wanted, side="right")
        blocks = np.maximum(np.searchsorted(self._index, wanted, side="right") - 1, 0)
        found = np.empty(len(wanted), np.int64)
        order = np.argsort(blocks, kind="stable")
        borders = [0, *(np.flatnonzero(np.diff(blocks[order])) + 1).tolist(), len(wanted)]
        for a, b in itertools.pairwise(borders):
            if a == b:
                continue
            here, first = order[a:b], int(blocks[order[a]]) * STRIDE
            inside = self.read(first, min(first + STRIDE, len(self)))
            found[here] = first + np.searchsorted(inside, wanted[here], side="right")
        return found

    @cached_property
    def _index(self) -> NDArray[Any]:
        """Every STRIDE-th number."""
        return np.concatenate([self.read(at, at + 1) for at in range(0, len(self), STRIDE)])

    @cached_property
    def _descriptor(self) -> int:
        opened = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, opened)
        return opened
