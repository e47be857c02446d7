"""A bounded cache of blocks on the local disk, shared by all processes of a host.

The cache is one file (`cache_file.py`). A line holds 4 consecutive blocks of 4 KiB of one file of a store. It can be in
one of the 16 places (ways) of one set. Consecutive lines of a store's file belong to consecutive sets. The entry of a
place says which line of which file it holds (a tag of 64 bits), which of the blocks are valid, and when the line was
last used. A new line replaces the least recently used one of its set.

**Nothing is locked, and nothing is trusted.** Processes and threads read and write entries and lines at the same time.
A reader can see a line that another process replaces at this moment, an entry whose line is older, or the rest of
a write that a killed process did not finish. Two tags can be equal. A disk can change bytes. Therefore the blocks that
`get` returns are only candidates: the caller compares each with its checksum, and a block that differs is a miss. The
caller fetches it and calls `put`, which overwrites the wrong bytes.

The file is read with pread, never through a memory map: a process that touches a mapped page of a file which was cut is
killed by SIGBUS. With pread, a cut file is a miss.

**A failing disk never stops the run.** A full disk, an error of the disk, a missing permission or a removed file is
counted (`ReadCounts.cache_errors`) and told once for each reason. The cache pauses for a second, after repeated
failures for up to a minute, and tries again. A pause is necessary because each access to a failing disk can take
seconds. If the disk is full or read-only, only writing pauses.

A full cache cannot make a reader wait: `put` overwrites a line at once. No other thread must make room first.

A line has 4 blocks because a host reads random rows of a store. A row of 8 KiB lies in 3 blocks and takes 6 blocks of
the cache, with lines of 8 blocks 10, and with lines of 16 blocks 18 (`bench/block_cache.py`). Larger lines have fewer
entries: in a single measurement on a busy machine, ranges of 4 MiB took 1.3 times as long with 4 blocks as with 8.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from forerun.config import schema
from forerun.data.blocks import BLOCK_BYTES
from forerun.data.reads.cache_file import (
    ENTRY,
    HEADER_BYTES,
    LINE_BLOCKS,
    LINE_BYTES,
    CacheFile,
    geometry_within,
    open_cache_file,
)
from forerun.data.reads.cache_size import cache_size
from forerun.data.reads.read_counts import ReadCounts
from forerun.errors import Problem
from forerun.reporter import Reporter
from forerun.units import Bytes

_KEY = struct.Struct("<QQ")
_AFTER_TAG = struct.Struct("<HHI")
_STAMP = struct.Struct("<I")
_STAMP_AT = ENTRY.size - _STAMP.size
_MIX = 0x9E3779B97F4A7C15  # odd, so different lines of a file have different tags
_MASK = (1 << 64) - 1
_ALL = (1 << LINE_BLOCKS) - 1  # every block of a line is valid
_TICKS = 4  # per second, of the time of last use; 32 bits last for 34 years
_EPOCH_SECONDS = 1_700_000_000
_ONLY_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # existing blocks can still be read
_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class BlockCache:
    """A cache of blocks. The caller compares every block with its checksum. All methods are thread-safe.

    The caller counts hits, misses and damaged blocks, because only the comparison decides which one a block is.
    """

    def __init__(
        self,
        file: Path,
        limit_bytes: int,
        counts: ReadCounts,
        reporter: Reporter,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the cache file.

        Args:
          file: the cache file, which may exist.
          limit_bytes: the file is never larger. Below the size of one line, nothing is cached.
          counts: failures are added to it.
          reporter: receives a message for the user, once for each kind of failure.
          clock: the time in seconds, for tests.
        """
        self.file = file
        self._wanted = geometry_within(limit_bytes)
        self._counts, self._reporter, self._clock = counts, reporter, clock
        self._told: set[str] = set()
        self._lock = threading.Lock()  # protects opening and the pauses, not the content
        self._file_open: CacheFile | None = None
        self._pause_seconds = _PAUSE_SECONDS
        self._open_after = self._write_after = 0.0  # seconds of the clock
        self._usable()

    @property
    def size_bytes(self) -> int:
        """Largest size of the file; 0 if it is not open. If other processes use the file, it is their size."""
        opened = self._file_open
        return 0 if opened is None else opened.geometry.size_bytes

    def get(self, key: bytes, block: int, count: int) -> list[bytes | None]:
        """Return `count` blocks of a file from `block` on, None for those that are not cached. They are UNVERIFIED.

        Args:
          key: 16 bytes that identify the file's name and content.
          block: number of the first block.
          count: how many.
        """
        found: list[bytes | None] = [None] * count
        for first, data in self.runs(key, block, count):
            at = first - block
            if len(data) <= BLOCK_BYTES:
                found[at] = data
            else:
                pieces = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
                found[at : at + len(pieces)] = pieces
        return found

    def runs(self, key: bytes, block: int, count: int) -> list[tuple[int, bytes]]:
        """Return what `get` returns, without a copy for each block: (number of the first block, bytes) in order.

        Blocks that the cache does not have are missing. Adjacent runs are not always merged.
        """
        opened = self._usable()
        if opened is None or count <= 0:
            return []
        try:
            found, used = self._read(opened, key, block, count)
        except OSError as error:
            self._failed(opened, error)
            return []
        if used and not self._writing_pauses:
            try:
                stamp = _STAMP.pack(self._now())
                for offset in used:
                    os.pwrite(opened.descriptor, stamp, offset)
            except OSError as error:
                self._failed(opened, error)
        return found

    def put(self, key: bytes, block: int, data: bytes) -> None:
        """Store whole blocks, from the block of this number on. Only the last block of a file may be shorter."""
        opened = self._usable()
        if opened is None or not data or self._writing_pauses:
            return
        try:
            self._write(opened, key, block, data)
        except OSError as error:
            self._failed(opened, error)
        else:
            self._write_after, self._pause_seconds = 0.0, _PAUSE_SECONDS  # the disk works

    @property
    def _writing_pauses(self) -> bool:
        return self._write_after > 0 and self._clock() < self._write_after

    def _read(self, opened: CacheFile, key: bytes, block: int, count: int) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Return the runs of blocks, and the offsets of the times of last use that are not the present time."""
        descriptor, (sets, set_bytes, lines_at) = opened.descriptor, opened.layout
        set_of, tag_of = _KEY.unpack(key)
        now, stop = self._now(), block + count
        line, last_line = block // LINE_BLOCKS, (stop - 1) // LINE_BLOCKS
        places, used = _Places(), []
        while line <= last_line:
            first_set = (set_of + line) % sets
            lines = min(last_line + 1 - line, sets - first_set)
            entries_at = HEADER_BYTES + first_set * set_bytes
            entries = os.pread(descriptor, lines * set_bytes, entries_at)
            for here in range(lines):
                at = _entry(entries, here * set_bytes, set_bytes, (tag_of + line * _MIX) & _MASK)
                if at >= 0:
                    valid, last_bytes, stamp = _AFTER_TAG.unpack_from(entries, at + 8)
                    if stamp != now:
                        used.append(entries_at + at + _STAMP_AT)
                    way = (at - here * set_bytes) // ENTRY.size
                    offset = lines_at + (way * sets + first_set + here) * LINE_BYTES
                    first = line * LINE_BLOCKS
                    if valid == _ALL and not last_bytes and block <= first and first + LINE_BLOCKS <= stop:
                        places.add(first, offset, LINE_BYTES)  # most lines of a long range
                    else:
                        places.add_valid(block, stop, first, offset, valid, last_bytes)
                line += 1
        found = []
        for first, offset, size in places.found:
            data = os.pread(descriptor, size, offset)
            if len(data) < size:  # the file was cut
                data = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES]
            if data:
                found.append((first, data))
        return found, used

    def _write(self, opened: CacheFile, key: bytes, block: int, data: bytes) -> None:
        descriptor, (sets, set_bytes, lines_at) = opened.descriptor, opened.layout
        set_of, tag_of = _KEY.unpack(key)
        now = self._now()
        view, stop = memoryview(data), block + -(-len(data) // BLOCK_BYTES)
        line, last_line = block // LINE_BLOCKS, (stop - 1) // LINE_BLOCKS
        way = 0
        while line <= last_line:
            first_set = (set_of + line) % sets
            lines = min(last_line + 1 - line, sets - first_set)
            entries_at = HEADER_BYTES + first_set * set_bytes
            entries = os.pread(descriptor, lines * set_bytes, entries_at).ljust(lines * set_bytes, b"\0")
            places, changes = _Places(), []
            for here in range(lines):
                tag = (tag_of + line * _MIX) & _MASK
                at = _entry(entries, here * set_bytes, set_bytes, tag)
                if at >= 0:
                    valid, last_bytes, _ = _AFTER_TAG.unpack_from(entries, at + 8)
                    way = (at - here * set_bytes) // ENTRY.size
                else:
                    valid, last_bytes = 0, 0
                    way = _oldest(entries[here * set_bytes : (here + 1) * set_bytes], now, way)
                    at = here * set_bytes + way * ENTRY.size
                begin = line * LINE_BLOCKS
                first, end = max(block, begin), min(stop, begin + LINE_BLOCKS)
                offset = lines_at + (way * sets + first_set + here) * LINE_BYTES + (first - begin) * BLOCK_BYTES
                size = min((end - first) * BLOCK_BYTES, len(data) - (first - block) * BLOCK_BYTES)
                places.add(first, offset, size)
                valid |= ((1 << (end - first)) - 1) << (first - begin)
                last_bytes = size % BLOCK_BYTES or last_bytes
                changes.append((entries_at + at, ENTRY.pack(tag, valid, last_bytes, now)))
                line += 1
            # The blocks first: a process that is killed in between leaves blocks without an entry.
            for first, offset, size in places.found:
                start = (first - block) * BLOCK_BYTES
                _write_all(descriptor, view[start : start + size], offset)
            for offset, entry in changes:
                _write_all(descriptor, entry, offset)

    def _usable(self) -> CacheFile | None:
        """Return the open file. Open it again if it was removed, or if a pause after a failure is over."""
        opened = self._file_open
        try:
            if opened is not None and not opened.is_removed:
                return opened
        except OSError as error:
            self._failed(opened, error)
        if self._wanted is None:
            return None
        with self._lock:
            if self._file_open is not opened:  # another thread was faster
                return self._file_open
            if opened is not None:
                self._file_open = None
                self._report("was removed while it was in use", "a new one is created")
            if self._clock() < self._open_after:
                return None
            try:
                self._file_open = open_cache_file(self.file, self._wanted)
            except OSError as error:
                self._open_after = self._pause()
                self._report(f"cannot be opened: {error.strerror or error}", "the run reads without it until it can")
                return None
            used, wanted = self._file_open.geometry, self._wanted
            if used != wanted:
                sizes = f"has {Bytes(used.size_bytes)} instead of {Bytes(wanted.size_bytes)}"
                self._tell_once(
                    f"the local cache {self.file} {sizes}: another run opened it with this size and uses it"
                )
            return self._file_open

    def _failed(self, opened: CacheFile | None, error: OSError) -> None:
        """Count and tell a failure, and pause: only writing if the rest works, otherwise everything."""
        with self._lock:
            if error.errno in _ONLY_WRITES:
                self._write_after = self._pause()
                self._report(f"cannot be written: {error.strerror}", "nothing is added to it until it can")
                return
            if self._file_open is opened:  # otherwise another thread has closed it already
                self._file_open = None
                self._open_after = self._pause()
            self._report(f"failed: {error.strerror or error}", "the run reads without it until it works")

    def _pause(self) -> float:
        """Return the end of the next pause, and double the one after it."""
        seconds, self._pause_seconds = self._pause_seconds, min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        return self._clock() + seconds

    def _report(self, problem: str, result: str) -> None:
        self._counts.add(cache_errors=1)
        failure = Problem(
            "E-DATA-185",
            f"the local cache {self.file} {problem}",
            why=result,
            fix="free disk space, set a smaller data.cache_gib, or put the cache on another disk with XDG_CACHE_HOME",
        )
        self._tell_once(f"{failure.what}; {failure.why}  [{failure.code}]")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._reporter.warn(text)

    def _now(self) -> int:
        return int((self._clock() - _EPOCH_SECONDS) * _TICKS) & 0xFFFFFFFF


def job_cache(data: schema.Data, counts: ReadCounts, reporter: Reporter) -> BlockCache | None:
    """Return the cache of a job, in the cache folder of this host; None if `data.cache_gib` is 0.

    Args:
      data: the data section of the job.
      counts: failures are added to it.
      reporter: receives a message for the user, once for each kind of failure.
    """
    size = cache_size(data)
    return BlockCache(size.file, size.limit_bytes, counts, reporter) if size.limit_bytes else None


class _Places:
    """Places of blocks in the cache file: [number of the first block, offset, bytes]. Adjacent ones become one."""

    __slots__ = ("_next_block", "_next_offset", "found")

    def __init__(self) -> None:
        self.found: list[list[int]] = []
        self._next_block = self._next_offset = -1

    def add(self, block: int, offset: int, size: int) -> None:
        """Add `size` bytes from `block` on, which are at `offset`."""
        if block == self._next_block and offset == self._next_offset:
            self.found[-1][2] += size
        else:
            self.found.append([block, offset, size])
        # Only the last block of a file is shorter, so nothing follows it and the rounding does not matter.
        self._next_block, self._next_offset = block + size // BLOCK_BYTES, offset + size

    def add_valid(self, block: int, stop: int, begin: int, offset: int, valid: int, last_bytes: int) -> None:
        """Add the valid blocks of `block` .. `stop - 1` that are in the line from `begin` on, which is at `offset`."""
        block, stop = max(block, begin), min(stop, begin + LINE_BLOCKS)
        all_of_them = (1 << (stop - block)) - 1
        wanted = (valid >> (block - begin)) & all_of_them
        short = begin + valid.bit_length() - 1 if 0 < last_bytes < BLOCK_BYTES else -1
        if wanted == all_of_them and not block <= short < stop:
            self.add(block, offset + (block - begin) * BLOCK_BYTES, (stop - block) * BLOCK_BYTES)
            return
        for one in range(block, stop):
            if (wanted >> (one - block)) & 1:
                self.add(one, offset + (one - begin) * BLOCK_BYTES, last_bytes if one == short else BLOCK_BYTES)


def _entry(entries: bytes, start: int, set_bytes: int, tag: int) -> int:
    """Return where the entry with this tag starts in the set at `start`; -1 if the set has none."""
    wanted, stop = tag.to_bytes(8, "little"), start + set_bytes
    at = entries.find(wanted, start, stop)
    while at >= 0 and (at - start) % ENTRY.size:  # the bytes of other fields
        at = entries.find(wanted, at + 1, stop)
    return at if at + ENTRY.size <= len(entries) else -1  # the file was cut in the middle of the entry


def _oldest(entries: bytes, now: int, preferred: int) -> int:
    """Return the way whose line was not used for the longest time; `preferred` if it is as old.

    A time in the future counts as old: the clock was wrong when it was written.
    """
    stamps = [stamp if stamp <= now + _TICKS else 0 for *_, stamp in ENTRY.iter_unpack(entries)]
    oldest = min(stamps)
    return preferred if stamps[preferred] == oldest else stamps.index(oldest)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes. One call can write less, for example up to the end of the space."""
    written = os.pwrite(descriptor, data, offset)
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
