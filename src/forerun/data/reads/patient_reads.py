"""Reads of byte ranges that are repeated until each answer has the right length.

The driver of a bucket repeats requests that fail at once. Here the rest is handled: requests that still fail, and
answers that are too short or too long. The repetitions follow the schedule `READS`. An object that is missing or has
another size is damaged, and is not asked for again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from forerun.errors import StorageError, UserError
from forerun.reporter import SILENT
from forerun.storage.folder import FileRange, Folder
from forerun.storage.retries import READS, StorageUnavailable, with_retries


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


# Two ranges with at most this gap are one request. At 65 MB/s per request the gap costs 1 ms, and another request
# costs tens of milliseconds of latency, the work of both sides, and a fee.
GAP_BYTES = 1 << 16
SPAN_BYTES = 1 << 23  # limit of one request: a failed one is repeated completely
GROUP_BYTES = 1 << 24  # of blocks that one call fetches at a time, so that a large call needs little memory
PROBES = 3  # requests for the last byte of a range, which decide that an object is too short
APART = 16  # ranges that are asked for at the same time, one request each, after a failure


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


class PatientReads:
    """Reads ranges of a folder.

    Args:
      folder: the folder.
      counts: counts requests, bytes and repetitions.
      limit: bounds the bytes in flight.
    """

    def __init__(self, folder: Folder, counts: ReadCounts, limit: ByteLimit) -> None:
        self.folder, self._counts, self._limit = folder, counts, limit

    def read(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """Return the bytes of each range. All answers have the right length; their content is not verified.

        Raises:
          UserError: an object is missing or has another size.
          StorageError: the bucket does not answer correctly for too long.
        """
        contents: dict[FileRange, bytes] = {}
        tries = itertools.count()

        def read_missing() -> None:
            missing = [one for one in dict.fromkeys(ranges) if one not in contents]
            answers = self._asked(missing, together=next(tries) == 0)
            wrong = []
            for one, answer in zip(missing, answers, strict=True):
                if isinstance(answer, bytes) and len(answer) == one.stop - one.start:
                    contents[one] = answer
                else:
                    wrong.append((one, answer))
            self._counts.add(failed_requests=len(wrong))
            for one, answer in wrong:
                self._refuse_hopeless(one, answer)
            if wrong:
                raise self._unavailable(*wrong[0])

        if ranges:
            with self._limit.admitted(sum(one.stop - one.start for one in ranges)):
                with_retries(read_missing, READS, SILENT)
        return [contents[one] for one in ranges]

    def _asked(self, ranges: Sequence[FileRange], *, together: bool) -> list[bytes | Exception]:
        """Return an answer or an exception for each range.

        One failure fails all ranges that are asked for together. After a failure each range therefore is asked for
        alone: with many ranges, some request would fail again in most repetitions.
        """
        if together:
            try:
                found = self.folder.read_ranges(ranges)
            except (OSError, StorageError) as error:
                if len(ranges) == 1:
                    self._counts.add(requests=1)
                    return [error]
            else:
                self._counts.add(requests=len(ranges), read_bytes=sum(map(len, found)))
                return list(found)
        with ThreadPoolExecutor(min(APART, len(ranges)), thread_name_prefix="forerun-read") as pool:
            return list(pool.map(self._alone, ranges))

    def _alone(self, one: FileRange) -> bytes | Exception:
        self._counts.add(requests=1)
        try:
            found = self.folder.read_ranges([one])[0]
        except (OSError, StorageError) as error:
            return error
        self._counts.add(read_bytes=len(found))
        return found

    def _refuse_hopeless(self, one: FileRange, answer: bytes | Exception) -> None:
        """Raise UserError if an object is missing, or ends before the range."""
        if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
            return
        last = FileRange(one.name, one.stop - 1, one.stop)
        for _ in range(PROBES):  # a single empty answer may be an accident
            if isinstance(answer, FileNotFoundError):
                raise damaged_object(self.folder, one.name, "it is missing") from None
            answer = self._alone(last)
            if isinstance(answer, bytes) and answer:
                return
            if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
                return
        raise damaged_object(self.folder, one.name, f"it ends before byte {one.stop}: it was cut short")

    def _unavailable(self, one: FileRange, answer: bytes | Exception) -> StorageUnavailable:
        last = f"{answer}" if isinstance(answer, Exception) else f"the last answer had {len(answer)} bytes"
        return StorageUnavailable(
            "E-DATA-182",
            f"{self.folder.address}/{one.name} cannot be read",
            why=f"bytes {one.start} to {one.stop - 1} were asked for during {READS.total_seconds:g} seconds: {last}",
            fix="check the network and the permissions, and run the same command again",
        )


def merged(ranges: Sequence[FileRange]) -> list[FileRange]:
    """Return spans that cover all ranges. Near ranges of one file are one span, of at most SPAN_BYTES."""
    spans: list[FileRange] = []
    for one in sorted(set(ranges)):
        last = spans[-1] if spans else None
        stop = 0 if last is None else max(last.stop, one.stop)
        if last and last.name == one.name and one.start - last.stop <= GAP_BYTES and stop - last.start <= SPAN_BYTES:
            spans[-1] = FileRange(one.name, last.start, stop)
        else:
            spans.append(one)
    return spans


def grouped(spans: Iterable[FileRange]) -> Iterator[list[FileRange]]:
    """Yield the spans in groups of about GROUP_BYTES."""
    group: list[FileRange] = []
    size_bytes = 0
    for span in spans:
        if group and size_bytes + span.stop - span.start > GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(span)
        size_bytes += span.stop - span.start
    if group:
        yield group


def damaged_object(folder: Folder, name: str, why: str) -> UserError:
    """Return the error for an object of a store that is missing or cut short."""
    return UserError("E-DATA-181", f"{folder.address}/{name} is damaged", why=why, fix=rebuild_fix(folder, name))


def rebuild_fix(folder: Folder, name: str) -> str:
    """Return the fix for a damaged object: the folder to remove."""
    unit = f"{folder.address}/{name.rpartition('/')[0]}".rstrip("/")
    return f"remove the folder {unit} and run the same command again, which rebuilds only that folder"
