"""What all reads of a job's stores in buckets share: the counts, the cache of blocks, and messages for the user."""

from __future__ import annotations

import threading

from forerun.config import schema
from forerun.data.reads.block_reader import BlockReader, Cache
from forerun.data.reads.cache_size import job_cache
from forerun.data.reads.patient_reads import ReadCounts
from forerun.reporter import Reporter
from forerun.storage.folder import Folder

NAMES = "data_"  # prefix of the counts in metrics.jsonl and summary.json


class StoreReads(Reporter):
    """The reads of a job, which keeps warnings for `take_messages`. All threads of a process share it.

    Args:
      cache: the cache of blocks, or None.
      counts: the counts, which the cache shares.
    """

    def __init__(self, cache: Cache | None = None, counts: ReadCounts | None = None) -> None:
        self.cache, self.counts = cache, counts or ReadCounts()
        self._readers: list[BlockReader] = []
        self._messages: list[str] = []
        self._is_damage_told = False
        self._lock = threading.Lock()

    def reader(self, folder: Folder) -> BlockReader:
        """Return a reader of the blocks of a store."""
        reader = BlockReader(folder, self.cache, self.counts)
        self._readers.append(reader)
        return reader

    def warn(self, text: str) -> None:
        with self._lock:
            self._messages.append(text)

    def take_messages(self) -> list[str]:
        """Return the messages since the last call. The first damaged block is one of them."""
        with self._lock:
            found, self._messages = self._messages, []
            damaged = self.counts.damaged_blocks
            if damaged and not self._is_damage_told:
                self._is_damage_told = True
                found.append(f"data: {_blocks(damaged)} arrived damaged from the bucket and was fetched again")
        return found

    def total(self) -> str | None:
        """Return a line for the end of a run about damaged and failed reads; None if there were none."""
        figures = self.figures()
        damaged, failed, cached, errors = (
            figures[NAMES + name] for name in ("damaged_blocks", "failed_requests", "cache_damaged", "cache_errors")
        )
        texts = []
        if damaged:
            texts.append(f"{_blocks(damaged)} arrived damaged and {'was' if damaged == 1 else 'were'} fetched again")
        if failed:
            texts.append(
                f"{failed} request{'' if failed == 1 else 's'} failed and {'was' if failed == 1 else 'were'} repeated"
            )
        if cached:
            texts.append(f"{_blocks(cached)} of the cache differed and {'was' if cached == 1 else 'were'} fetched")
        if errors:
            texts.append(f"the local cache failed {errors} time{'' if errors == 1 else 's'}")
        return f"data: {'; '.join(texts)}" if texts else None

    def figures(self) -> dict[str, int]:
        """Return the counts under the names of metrics.jsonl and summary.json.

        Requests that the driver of a bucket repeated by itself count as failed requests too.
        """
        found = {NAMES + name: int(value) for name, value in self.counts.to_json().items()}
        repeated: dict[str, int] = {}  # by service, because the driver counts for the whole process
        for reader in self._readers:
            service = reader.folder.address.partition(":")[0]
            repeated[service] = max(repeated.get(service, 0), reader.repeated_requests)
        for name in ("requests", "failed_requests"):
            found[NAMES + name] += sum(repeated.values())
        return found


def job_reads(data: schema.Data) -> StoreReads:
    """Return the reads of a job, with its cache."""
    reads = StoreReads()
    reads.cache = job_cache(data, reads.counts, reads)
    return reads


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"
