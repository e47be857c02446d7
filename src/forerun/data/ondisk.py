"""An array in a file, of which only what is asked for is read.

Not a memory map: the pages of a map that a run has touched count as its memory for as long as it lives (with large
pages in the cache, 2 MB for every number looked at), and a file that is cut short under a map ends the process
without a word. Here a short read is an error that names the file.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

MANY = 1 << 14  # places asked for at a time; beyond, the file is mapped for that one question
STRIDE = 1 << 12  # numbers between two entries of the index of a sorted array


class OnDisk:
    """A flat array of `dtype` in `file`; it travels to another process as its name."""

    def __init__(self, file: Path, dtype: np.dtype[Any]) -> None:
        self.file, self.dtype = file, np.dtype(dtype)
        self._size = file.stat().st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._size

    def __reduce__(self) -> tuple[Any, ...]:
        return OnDisk, (self.file, self.dtype)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Numbers `start` .. `stop`, as a new array."""
        size = self.dtype.itemsize
        wanted = (stop - start) * size
        raw = os.pread(self._descriptor, wanted, start * size)
        while len(raw) < wanted:  # a read is cut at 2 GiB
            more = os.pread(self._descriptor, wanted - len(raw), start * size + len(raw))
            if not more:
                raise OSError(f"{self.file} ends before number {stop}: it was cut short")
            raw += more
        return np.frombuffer(raw, self.dtype)

    def at(self, places: ArrayLike) -> NDArray[Any]:
        """The numbers at `places` [n]: neighbours that follow one another are read together."""
        at = np.asarray(places, np.int64)
        if len(at) > MANY:
            return self._mapped()[at]
        if not len(at):
            return np.zeros(0, self.dtype)
        borders = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
        runs = [self.read(int(at[a]), int(at[b - 1]) + 1) for a, b in itertools.pairwise(borders)]
        return np.concatenate(runs)

    def places_of(self, values: ArrayLike) -> NDArray[np.int64]:
        """Of a sorted array: np.searchsorted(self, values, side="right")."""
        wanted = np.asarray(values)
        if len(wanted) > MANY:
            return np.searchsorted(self._mapped(), wanted, side="right")
        blocks = np.maximum(np.searchsorted(self._index, wanted, side="right") - 1, 0)
        found = np.empty(len(wanted), np.int64)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            inside = self.read(block * STRIDE, min((block + 1) * STRIDE, len(self)))
            found[here] = block * STRIDE + np.searchsorted(inside, wanted[here], side="right")
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

    def _mapped(self) -> NDArray[Any]:
        """For one large question; the map goes when the answer is there."""
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, self.dtype)
