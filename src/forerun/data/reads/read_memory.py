"""The memory that the reads of all buckets of a process share: recently used parts, and the limit of bytes in flight.

The limits hold for the process, not for each store, so a mixture of many stores needs no more memory than one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")

IN_FLIGHT_BYTES = 1 << 26  # of all requests that wait for an answer
SUMS_BYTES = 1 << 23  # of checksums: they are for 4 GiB of data
BLOCKS_BYTES = 1 << 25  # of offsets, and of extents if there is no cache
ARRAYS_BYTES = 1 << 25  # of complete arrays of offsets


class Recent(Generic[V]):
    """Values by key, up to a limit of their total size. The values that were not used for the longest time go first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._used_bytes = limit_bytes, 0
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key, or None."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: V, size_bytes: int) -> None:
        """Add a value, and remove old values until the limit holds. A value above the limit is not kept."""
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._used_bytes -= before
            if size_bytes > self._limit_bytes:
                return
            self._values[key] = value, size_bytes
            self._used_bytes += size_bytes
            while self._used_bytes > self._limit_bytes:
                self._used_bytes -= self._values.popitem(last=False)[1][1]

    @property
    def used_bytes(self) -> int:
        return self._used_bytes


class ByteLimit:
    """Admits work as long as its total size is below a limit. Work above the limit is admitted alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._used_bytes, self.peak_bytes = limit_bytes, 0, 0
        self._changed = threading.Condition()

    @contextmanager
    def admitted(self, size_bytes: int) -> Iterator[None]:
        """Wait until there is room, and hold it until the block ends."""
        with self._changed:
            while self._used_bytes and self._used_bytes + size_bytes > self._limit_bytes:
                self._changed.wait()
            self._used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        try:
            yield
        finally:
            with self._changed:
                self._used_bytes -= size_bytes
                self._changed.notify_all()


@dataclass(frozen=True)
class ReadMemory:
    """The shared memory of readers. All values in it are verified."""

    sums: Recent[bytes] = field(default_factory=lambda: Recent(SUMS_BYTES))
    blocks: Recent[bytes] = field(default_factory=lambda: Recent(BLOCKS_BYTES))
    arrays: Recent[object] = field(default_factory=lambda: Recent(ARRAYS_BYTES))
    in_flight: ByteLimit = field(default_factory=lambda: ByteLimit(IN_FLIGHT_BYTES))


PROCESS = ReadMemory()
