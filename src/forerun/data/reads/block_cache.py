"""A bounded cache of blocks on the local disk, shared by all processes of a host.

The cache is one file. It has a page with the geometry, then the entries of all sets, then the lines. Lines of the same
way and of consecutive sets are next to each other, so a long range that was written at once is read with one call. The
file grows when lines are written. A part that is missing, because it was never written or because the file was cut,
reads as "not cached". A line holds 4 consecutive blocks of 4 KiB of one file of a store. It can be in one of the 16
places (ways) of one set. Consecutive lines of a store's file belong to consecutive sets. The entry of a place says
which line of which file it holds (a tag of 64 bits), which of the blocks are valid, and when the line was last used. A
new line replaces the least recently used one of its set.

**One size for all processes.** A process holds a shared lock (flock) while it uses the file. It changes the size of the
cache only with the exclusive lock, that is, if no other process uses the file. Otherwise it uses the size that it
finds. There is one file, so all runs of a host together use at most the limit of the run that opened the file first.

**Content is not locked, and nothing is trusted.** Processes and threads read and write entries and lines at the same
time. A reader can see a line that another process replaces at this moment, an entry whose line is older, or the rest of
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
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_digest

from forerun.data.blocks import BLOCK_BYTES
from forerun.data.reads.patient_reads import ReadCounts
from forerun.errors import Problem
from forerun.reporter import Reporter
from forerun.units import Bytes

LINE_BLOCKS = 4
LINE_BYTES = LINE_BLOCKS * BLOCK_BYTES
WAYS = 16
ENTRY = struct.Struct("<QH2xI")  # tag of the line; valid blocks as bits; time of last use
HEADER_BYTES = BLOCK_BYTES
_HEADER = struct.Struct("<16sQQQ")
_MAGIC = b"forerun blocks 1"
_LOCK_ATTEMPTS = 100
_LOCK_WAIT_SECONDS = 0.01


@dataclass(frozen=True)
class CacheGeometry:
    """The number of sets of lines, and of lines (ways) in each set."""

    sets: int
    ways: int

    @property
    def set_bytes(self) -> int:
        """Size of the entries of one set."""
        return self.ways * ENTRY.size

    @property
    def lines_at(self) -> int:
        """Where the lines start: after the header and the entries, at a whole page."""
        return HEADER_BYTES + -(-self.sets * self.set_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def size_bytes(self) -> int:
        """Largest size of the file, with header and entries."""
        return self.lines_at + self.sets * self.ways * LINE_BYTES


def geometry_within(limit_bytes: int) -> CacheGeometry | None:
    """Return the largest geometry whose file has at most `limit_bytes`; None if not even one line fits."""
    room_bytes = limit_bytes - HEADER_BYTES
    sets, ways = room_bytes // (WAYS * (LINE_BYTES + ENTRY.size)), WAYS
    if sets < 1 or (sets == 1 and CacheGeometry(1, WAYS).size_bytes > limit_bytes):
        sets, ways = 1, min(WAYS, (room_bytes - BLOCK_BYTES) // LINE_BYTES)  # the entries fill a part of one page
    elif CacheGeometry(sets, ways).size_bytes > limit_bytes:  # the last page of entries is not full
        sets -= 1
    return CacheGeometry(sets, ways) if ways > 0 else None


class CacheFile:
    """An open cache file. It is closed when nothing refers to it any more, so no thread uses a closed descriptor."""

    def __init__(self, descriptor: int, geometry: CacheGeometry) -> None:
        self.descriptor, self.geometry = descriptor, geometry
        self.layout = geometry.sets, geometry.set_bytes, geometry.lines_at  # computed once, because every read needs it
        # Not at the end of the process: threads may still read, and the system closes the file.
        weakref.finalize(self, os.close, descriptor).atexit = False

    @property
    def is_removed(self) -> bool:
        """Whether the file has no name any more. It still takes space as long as a process has it open."""
        return os.fstat(self.descriptor).st_nlink == 0


def open_cache_file(file: Path, wanted: CacheGeometry) -> CacheFile:
    """Open or create the file. If other processes use it, its geometry stays, otherwise it becomes `wanted`.

    Raises:
      OSError: the file cannot be created, read or locked.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_LOCK_ATTEMPTS):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            geometry = _locked_geometry(descriptor, file, wanted)
        except BaseException:
            os.close(descriptor)
            raise
        if geometry is not None:
            return CacheFile(descriptor, geometry)
        os.close(descriptor)
        time.sleep(_LOCK_WAIT_SECONDS)
    raise OSError(errno.EBUSY, "another process holds its lock", str(file))


def stored_geometry(file: Path) -> CacheGeometry | None:
    """Return the geometry of an existing file; None if there is none or if it cannot be read."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _geometry(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _locked_geometry(descriptor: int, file: Path, wanted: CacheGeometry) -> CacheGeometry | None:
    """Take the shared lock and return the geometry. Return None if another process changes the file at this moment."""
    if _lock(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, file) and _geometry(descriptor) != wanted:
        os.ftruncate(descriptor, 0)
        fields = _HEADER.pack(_MAGIC, LINE_BYTES, wanted.sets, wanted.ways)
        os.pwrite(descriptor, fields + xxh3_64_digest(fields), 0)
    # The exclusive lock is released before the shared one is taken, so another process may set its own geometry here.
    if not _lock(descriptor, fcntl.LOCK_SH) or not _is_at(descriptor, file):
        return None
    geometry = _geometry(descriptor)
    if (
        geometry is None
    ):  # something else cut the file while processes use it: they find it removed and open the next one
        file.unlink(missing_ok=True)
    return geometry


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _geometry(descriptor: int) -> CacheGeometry | None:
    header = os.pread(descriptor, _HEADER.size + 8, 0)
    fields = header[: _HEADER.size]
    if len(header) < _HEADER.size + 8 or xxh3_64_digest(fields) != header[_HEADER.size :]:
        return None
    magic, line_bytes, sets, ways = _HEADER.unpack(fields)
    return CacheGeometry(sets, ways) if (magic, line_bytes) == (_MAGIC, LINE_BYTES) and sets * ways > 0 else None


_KEY = struct.Struct("<QQ")
_AFTER_TAG = struct.Struct("<H2xI")
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

        The last block of a file may be followed by other bytes, which the caller cuts off.

        Args:
          key: 16 bytes that identify the file's name and content.
          block: number of the first block.
          count: how many.
        """
        opened = self._usable()
        missing: list[bytes | None] = [None] * count
        if opened is None or count <= 0:
            return missing
        try:
            blocks, used = self._read(opened, key, block, count)
        except OSError as error:
            self._failed(opened, error)
            return missing
        if used and not self._writing_pauses:
            try:
                stamp = _STAMP.pack(self._now())
                for offset in used:
                    os.pwrite(opened.descriptor, stamp, offset)
            except OSError as error:
                self._failed(opened, error)
        return blocks

    def put(self, key: bytes, block: int, data: bytes) -> None:
        """Store blocks, from the block of this number on. Only the last block of a file may be shorter."""
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

    def _read(self, opened: CacheFile, key: bytes, block: int, count: int) -> tuple[list[bytes | None], list[int]]:
        """Return the blocks, and the offsets of the times of last use that are not the present time."""
        descriptor, (sets, set_bytes, lines_at) = opened.descriptor, opened.layout
        set_of, tag_of = _KEY.unpack(key)
        now, stop = self._now(), block + count
        line, last_line = block // LINE_BLOCKS, (stop - 1) // LINE_BLOCKS
        runs: list[list[int]] = []
        used: list[int] = []
        while line <= last_line:
            first_set = (set_of + line) % sets
            lines = min(last_line + 1 - line, sets - first_set)
            entries_at = HEADER_BYTES + first_set * set_bytes
            entries = os.pread(descriptor, lines * set_bytes, entries_at)
            for here in range(lines):
                at = _entry(entries, here * set_bytes, set_bytes, (tag_of + line * _MIX) & _MASK)
                if at >= 0:
                    valid, stamp = _AFTER_TAG.unpack_from(entries, at + 8)
                    if stamp != now:
                        used.append(entries_at + at + _STAMP_AT)
                    way = (at - here * set_bytes) // ENTRY.size
                    offset = lines_at + (way * sets + first_set + here) * LINE_BYTES
                    begin = line * LINE_BLOCKS
                    if valid == _ALL and block <= begin and begin + LINE_BLOCKS <= stop:  # most lines of a long range
                        _add_run(runs, begin, offset, LINE_BLOCKS)
                    else:
                        for number in range(max(block, begin), min(stop, begin + LINE_BLOCKS)):
                            if (valid >> (number - begin)) & 1:
                                _add_run(runs, number, offset + (number - begin) * BLOCK_BYTES, 1)
                line += 1
        blocks: list[bytes | None] = [None] * count
        for first, offset, size in runs:
            data = os.pread(descriptor, size * BLOCK_BYTES, offset)
            whole = len(data) // BLOCK_BYTES  # fewer than `size` if the file was cut
            pieces = [data[start : start + BLOCK_BYTES] for start in range(0, whole * BLOCK_BYTES, BLOCK_BYTES)]
            blocks[first - block : first - block + whole] = pieces
        return blocks, used

    def _write(self, opened: CacheFile, key: bytes, block: int, data: bytes) -> None:
        descriptor, (sets, set_bytes, lines_at) = opened.descriptor, opened.layout
        set_of, tag_of = _KEY.unpack(key)
        now = self._now()
        stop = block + -(-len(data) // BLOCK_BYTES)
        view = memoryview(data.ljust((stop - block) * BLOCK_BYTES, b"\0"))
        line, last_line = block // LINE_BLOCKS, (stop - 1) // LINE_BLOCKS
        way = 0
        while line <= last_line:
            first_set = (set_of + line) % sets
            lines = min(last_line + 1 - line, sets - first_set)
            entries_at = HEADER_BYTES + first_set * set_bytes
            entries = os.pread(descriptor, lines * set_bytes, entries_at).ljust(lines * set_bytes, b"\0")
            runs: list[list[int]] = []
            changes = []
            for here in range(lines):
                tag = (tag_of + line * _MIX) & _MASK
                at = _entry(entries, here * set_bytes, set_bytes, tag)
                if at >= 0:
                    valid, _ = _AFTER_TAG.unpack_from(entries, at + 8)
                    way = (at - here * set_bytes) // ENTRY.size
                else:
                    valid = 0
                    way = _oldest(entries[here * set_bytes : (here + 1) * set_bytes], now, way)
                    at = here * set_bytes + way * ENTRY.size
                begin = line * LINE_BLOCKS
                first, end = max(block, begin), min(stop, begin + LINE_BLOCKS)
                offset = lines_at + (way * sets + first_set + here) * LINE_BYTES + (first - begin) * BLOCK_BYTES
                _add_run(runs, first, offset, end - first)
                valid |= ((1 << (end - first)) - 1) << (first - begin)
                changes.append((entries_at + at, ENTRY.pack(tag, valid, now)))
                line += 1
            # The blocks first: a process that is killed in between leaves blocks without an entry.
            for first, offset, size in runs:
                start = (first - block) * BLOCK_BYTES
                _write_all(descriptor, view[start : start + size * BLOCK_BYTES], offset)
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


def _add_run(runs: list[list[int]], block: int, offset: int, size: int) -> None:
    """Add `size` blocks that are at `offset` of the cache file. If they continue the last run, it becomes longer."""
    if runs:
        last_block, last_offset, last_size = runs[-1]
        if block == last_block + last_size and offset == last_offset + last_size * BLOCK_BYTES:
            runs[-1][2] += size
            return
    runs.append([block, offset, size])


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
