"""Counts of what the reads of a token store needed, for metrics, the summary of a run and messages."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class ReadCounts:
    """Counts of a process. All threads add to them through `add`."""

    requests: int = 0  # to a bucket
    read_bytes: int = 0  # from a bucket
    cache_hits: int = 0  # blocks
    cache_misses: int = 0  # blocks
    cache_errors: int = 0  # reads and writes of the cache that failed
    cache_damaged: int = 0  # blocks of the cache that differed from their checksum
    damaged_blocks: int = 0  # blocks of a bucket that differed from their checksum and were fetched again
    failed_requests: int = 0  # requests that failed or were too short, and were repeated
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Add to counts by name."""
        with self._lock:
            for name, value in counts.items():
                setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> dict[str, Any]:
        """Return all counts by name."""
        with self._lock:
            return {one.name: getattr(self, one.name) for one in fields(self) if not one.name.startswith("_")}
