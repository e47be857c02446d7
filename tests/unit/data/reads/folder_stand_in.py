"""A folder of this machine that acts as a bucket: it counts round trips, and it can fail, cut and flip answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from forerun.data.blocks import SUFFIX, BlockSums
from forerun.storage.folder import FileRange, LocalFolder


class StandIn(LocalFolder):
    """Asks `change` about each answer: it returns the bytes to answer with, or raises."""

    is_local = False

    def __init__(self, path: Path, change: Callable[[FileRange, bytes], bytes] = lambda one, data: data) -> None:
        super().__init__(path)
        self.change = change
        self.calls: list[list[FileRange]] = []  # one entry per round trip
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return "gs://bucket/tokens"

    def read_ranges(self, ranges: Sequence[FileRange]) -> list[bytes]:
        with self._lock:
            self.calls.append(list(ranges))
        found = super().read_ranges(ranges)
        return [self.change(one, data) for one, data in zip(ranges, found, strict=True)]


class MemoryCache:
    """A cache of blocks in memory, which keeps everything."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, int], bytes] = {}

    def get(self, key: bytes, block: int, count: int) -> list[bytes | None]:
        return [self.blocks.get((key, n)) for n in range(block, block + count)]

    def put(self, key: bytes, block: int, data: bytes) -> None:
        for n, start in enumerate(range(0, len(data), 4096), block):
            self.blocks[key, n] = data[start : start + 4096]


def write_array(path: Path, numbers: np.ndarray) -> str:
    """Write an array with its checksums, and return the root."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sums = BlockSums()
    sums.update(numbers.tobytes())
    content, root = sums.finish()
    path.write_bytes(numbers.tobytes())
    path.with_name(path.name + SUFFIX).write_bytes(content)
    return root
