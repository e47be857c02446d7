"""The file of the local block cache: its layout, and how the processes of a host open one file together.

Layout: a page with the geometry, then the entries of all sets, then the lines. Lines of the same way and of consecutive
sets are next to each other, so a long range that was written at once is read with one call. The file grows when lines
are written. A part that is missing, because it was never written or because the file was cut, reads as "not cached".

A process holds a shared lock (flock) while it uses the file. It changes the size of the cache only with the exclusive
lock, that is, if no other process uses the file. Otherwise it uses the size that it finds. There is one file, so all
runs of a host together use at most the limit of the run that opened the file first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_digest

from forerun.data.blocks import BLOCK_BYTES

LINE_BLOCKS = 4
LINE_BYTES = LINE_BLOCKS * BLOCK_BYTES
WAYS = 16
ENTRY = struct.Struct("<QHHI")  # tag of the line; valid blocks as bits; bytes of the file's last block or 0; last use
HEADER_BYTES = BLOCK_BYTES
_HEADER = struct.Struct("<16sQQQ")
_MAGIC = b"forerun blocks 1"
_ATTEMPTS = 100
_PAUSE_SECONDS = 0.01


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
    for _ in range(_ATTEMPTS):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            geometry = _locked_geometry(descriptor, file, wanted)
        except BaseException:
            os.close(descriptor)
            raise
        if geometry is not None:
            return CacheFile(descriptor, geometry)
        os.close(descriptor)
        time.sleep(_PAUSE_SECONDS)
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
        os.pwrite(descriptor, _header(wanted), 0)
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


def _header(geometry: CacheGeometry) -> bytes:
    fields = _HEADER.pack(_MAGIC, LINE_BYTES, geometry.sets, geometry.ways)
    return fields + xxh3_64_digest(fields)


def _geometry(descriptor: int) -> CacheGeometry | None:
    header = os.pread(descriptor, _HEADER.size + 8, 0)
    fields = header[: _HEADER.size]
    if len(header) < _HEADER.size + 8 or xxh3_64_digest(fields) != header[_HEADER.size :]:
        return None
    magic, line_bytes, sets, ways = _HEADER.unpack(fields)
    return CacheGeometry(sets, ways) if (magic, line_bytes) == (_MAGIC, LINE_BYTES) and sets * ways > 0 else None
