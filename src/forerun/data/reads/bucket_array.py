"""Flat arrays in files of a bucket. They have the methods of `DiskArray`, and return only verified numbers.

The functions of this module serve several arrays in one call, because each request to a bucket takes tens of
milliseconds: the numbers of all units that a batch needs are asked for at the same time.

A place in a sorted array is found by interpolation. Offsets of documents grow almost linearly, so the first guess is
usually in the window of WINDOW_BLOCKS blocks that is fetched. Otherwise the window grows, and every second guess halves
the rest, so the search ends for any content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.blocks import BLOCK_BYTES
from forerun.data.reads.block_reader import BlockRange, BlockReader, SummedFile

RESIDENT_BYTES = 1 << 16  # a file of at most this size is fetched completely
WINDOW_BLOCKS = 8  # 4096 offsets: more than the usual distance from a line, in units of a million documents
LARGEST_WINDOW_BLOCKS = 128


class BucketArray:
    """A flat array in a file of a bucket. Nothing is read before its numbers are asked for.

    Args:
      reader: reads the blocks.
      name: name of the file, which contains nothing but the array, little endian.
      dtype: type of the numbers.
      count: how many numbers there are.
      root: root of the checksums of the file.
      is_kept: whether blocks that were read stay in memory for a while, because they are used again soon.
      is_whole: whether the complete array is fetched at the first use, and stays in memory for a while.
      ends: the first and the last number, if they are known. A search then needs one round trip less.
    """

    def __init__(
        self,
        reader: BlockReader,
        name: str,
        dtype: Any,
        count: int,
        root: str,
        *,
        is_kept: bool = False,
        is_whole: bool = False,
        ends: tuple[int, int] | None = None,
    ) -> None:
        self.reader, self.dtype, self._count = reader, np.dtype(dtype).newbyteorder("<"), count
        self.file = SummedFile(name, count * self.dtype.itemsize, root)
        self.is_whole = is_whole or (is_kept and self.file.size_bytes <= RESIDENT_BYTES)
        self.is_kept = is_kept and not self.is_whole
        self.ends = ends

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the numbers `start` .. `stop - 1` as a read-only array."""
        return read_parts([ArrayPart(self, start, stop)])[0]

    def at(self, places: ArrayLike) -> NDArray[Any]:
        """Return the numbers at `places` [n]."""
        return numbers_at([(self, np.asarray(places, np.int64))])[0]

    def places_of(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return `np.searchsorted(self, values, side="right")`. The array must be sorted."""
        return places_of([(self, np.asarray(values))])[0]


class ArrayPart(NamedTuple):
    """The numbers `start` .. `stop - 1` of an array. If one is missing, those of `around` are fetched with them."""

    array: BucketArray
    start: int
    stop: int
    around: tuple[int, int] | None = None

    @property
    def blocks(self) -> BlockRange:
        """The blocks that hold the numbers."""
        array, size = self.array, self.array.dtype.itemsize
        first, stop = _blocks(self.start * size, self.stop * size)
        wide_first, wide_stop = (first, stop) if self.around is None else _blocks(*(n * size for n in self.around))
        kept = array.is_kept
        return BlockRange(array.file, first, stop, min(first, wide_first), max(stop, wide_stop), kept)


def read_parts(parts: Sequence[ArrayPart]) -> list[NDArray[Any]]:
    """Return the numbers of all parts as read-only arrays. All parts are fetched at the same time."""
    if not parts:
        return []
    content = parts[0].array.reader.read([part.blocks for part in parts])
    found = []
    for part, data in zip(parts, content, strict=True):
        dtype = part.array.dtype
        if part.start == part.stop:
            found.append(np.zeros(0, dtype))
            continue
        offset = part.start * dtype.itemsize % BLOCK_BYTES
        found.append(np.frombuffer(data, dtype, part.stop - part.start, offset))
    return found


def numbers_at(requests: Sequence[tuple[BucketArray, NDArray[np.int64]]]) -> list[NDArray[Any]]:
    """Return the numbers at some places of each array, in any order. Each block is read once."""
    whole = _whole_arrays([array for array, _ in requests if array.is_whole])
    wanted: list[BlockRange] = []
    spans: list[tuple[NDArray[np.int64], int] | None] = []
    for array, places in requests:
        if array.is_whole or not len(places):
            spans.append(None)
            continue
        blocks = np.unique(places // (BLOCK_BYTES // array.dtype.itemsize))
        spans.append((blocks, len(wanted)))
        wanted += [BlockRange(array.file, n, n + 1, n, n + 1, array.is_kept) for n in blocks.tolist()]
    content = requests[0][0].reader.read(wanted) if wanted else []
    found = []
    for (array, places), span in zip(requests, spans, strict=True):
        if span is None:
            found.append(whole[array.file][places] if len(places) else np.zeros(0, array.dtype))
            continue
        blocks, first = span
        per_block = BLOCK_BYTES // array.dtype.itemsize
        numbers = np.frombuffer(b"".join(content[first : first + len(blocks)]), array.dtype)
        found.append(numbers[np.searchsorted(blocks, places // per_block) * per_block + places % per_block])
    return found


def places_of(requests: Sequence[tuple[BucketArray, NDArray[Any]]]) -> list[NDArray[np.int64]]:
    """Return `np.searchsorted(array, values, side="right")` of each request. The arrays must be sorted."""
    large = [array for array, values in requests if array.is_whole or len(values) * WINDOW_BLOCKS * 512 > len(array)]
    whole = _whole_arrays(large)
    found = [np.empty(len(values), np.int64) for _, values in requests]
    searches: list[_Search] = []
    for number, (array, values) in enumerate(requests):
        if array.file in whole:
            found[number][:] = np.searchsorted(whole[array.file], values, side="right")
        elif len(array):
            searches += [_Search(array, value, number, n) for n, value in enumerate(values.tolist())]
        else:
            found[number][:] = 0
    for search, place in zip(searches, _searched(searches), strict=True):
        found[search.request][search.place] = place
    return found


@dataclass
class _Search:
    """The search for the place of one value. It is at least `low` and at most `high`."""

    array: BucketArray
    value: int
    request: int
    place: int
    low: int = 0
    high: int = 0
    low_value: int = 0  # of the number before `low`
    high_value: int = 0  # of the number at `high`
    rounds: int = 0

    def begin(self, first: int, last: int) -> None:
        """Start with the first and the last number of the array."""
        count = len(self.array)
        if self.value < first:
            self.low = self.high = 0
        elif self.value >= last:
            self.low = self.high = count
        else:
            self.low, self.high, self.low_value, self.high_value = 1, count - 1, first, last

    def window(self) -> ArrayPart:
        """Return the numbers that are read next."""
        per_block = BLOCK_BYTES // self.array.dtype.itemsize
        share = 0.5
        if self.rounds % 2 == 0:  # low_value <= value < high_value
            share = (self.value - self.low_value) / (self.high_value - self.low_value)
        guess = self.low + int(share * (self.high - self.low))
        half = min(WINDOW_BLOCKS * 4**self.rounds, LARGEST_WINDOW_BLOCKS) // 2
        middle = (guess + per_block // 2) // per_block  # the border of blocks that is nearest to the guess
        start = max((middle - half) * per_block, self.low // per_block * per_block, 0)
        return ArrayPart(self.array, start, min((middle + half) * per_block, len(self.array)))

    def narrow(self, start: int, numbers: NDArray[Any]) -> None:
        """Use the numbers of a window, which begin at `start`."""
        self.rounds += 1
        before = int(np.searchsorted(numbers, self.value, side="right"))
        if 0 < before < len(numbers):
            self.low = self.high = start + before
        elif before:
            stop = start + len(numbers)
            self.low, self.low_value = stop, int(numbers[-1])
            self.high = max(self.high, stop)
        elif start <= self.low:
            self.low = self.high = min(self.low, start)
        else:
            self.high, self.high_value = start, int(numbers[0])


def _searched(searches: Sequence[_Search]) -> list[int]:
    """Return the place of each search. All searches advance together, with one call of the reader per round."""
    arrays = {search.array.file: search.array for search in searches}
    unknown = [array for array in arrays.values() if array.ends is None]
    values = read_parts([ArrayPart(array, n, n + 1) for array in unknown for n in (0, len(array) - 1)])
    for array, first, last in zip(unknown, values[::2], values[1::2], strict=True):
        array.ends = int(first[0]), int(last[0])
    for search in searches:
        search.begin(*(arrays[search.array.file].ends or (0, 0)))
    while open_ := [search for search in searches if search.low < search.high]:
        windows = [search.window() for search in open_]
        for search, window, numbers in zip(open_, windows, read_parts(windows), strict=True):
            search.narrow(window.start, numbers)
    return [search.low for search in searches]


def _whole_arrays(arrays: Sequence[BucketArray]) -> dict[SummedFile, NDArray[Any]]:
    """Return complete arrays. Those that are not in memory are fetched at the same time."""
    found: dict[SummedFile, NDArray[Any]] = {}
    missing: dict[SummedFile, BucketArray] = {}
    for array in arrays:
        known = array.reader.memory.arrays.get(array.file)
        if isinstance(known, np.ndarray):
            found[array.file] = known
        else:
            missing[array.file] = array
    content = read_parts([ArrayPart(array, 0, len(array)) for array in missing.values()])
    for (file, array), numbers in zip(missing.items(), content, strict=True):
        found[file] = numbers
        if array.is_whole:
            array.reader.memory.arrays.put(file, numbers, numbers.nbytes)
    return found


def _blocks(start_byte: int, stop_byte: int) -> tuple[int, int]:
    """Return the first block of a range of bytes, and the block after its last one."""
    first = start_byte // BLOCK_BYTES
    return first, max(first, -(-stop_byte // BLOCK_BYTES)) if stop_byte > start_byte else first
