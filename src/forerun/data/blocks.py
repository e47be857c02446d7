"""Checksums of a file's blocks, stored in a file next to it and compared whenever a block is read.

`NAME.sums` holds one xxh3_64 per block of `NAME`, then one per page of these checksums. The root is a checksum of the
second part and of the size of `NAME`; the owner of the file records it (`unit.json`, `index.json`, `plan.json`).
A reader compares the blocks that it reads, the page with their checksums, and the second part with the root. Reading
one number of a large file therefore reads one block and one page, not all checksums.

A block has 4 KiB, the size of a page of memory. The system reads at least a page from a disk, so a small read at a
random place reads no more data than without checksums. In measurements with reads of 8 bytes to 4 KiB, blocks of 4 KiB
were as fast as any. Blocks of 1 KiB need more calls (up to 1.2 times the time). Blocks of 16 KiB (1.1 to 1.4 times)
and 64 KiB (2 to 2.5 times) read more bytes.
"""

from __future__ import annotations

import os
from functools import cached_property, lru_cache, partial
from pathlib import Path

from xxhash import xxh3_64_digest, xxh3_64_hexdigest

from forerun.errors import UserError

BLOCK_BYTES = 4096
SUM_BYTES = 8
PAGE_BYTES = 4096  # of a page of checksums
PAGE_BLOCKS = PAGE_BYTES // SUM_BYTES
CACHED_PAGES = 16  # for each open file: 64 KiB, the checksums of 32 MiB
SUFFIX = ".sums"


class BlockSums:
    """Computes the checksums of a file while it is written."""

    def __init__(self) -> None:
        self._rest = b""
        self._sums = bytearray()
        self._size_bytes = 0

    def update(self, data: bytes) -> None:
        """Add the next bytes of the file."""
        self._size_bytes += len(data)
        data = self._rest + data if self._rest else data
        end = len(data) // BLOCK_BYTES * BLOCK_BYTES
        self._sums += _sums(memoryview(data)[:end], BLOCK_BYTES)
        self._rest = data[end:]

    def finish(self) -> tuple[bytes, str]:
        """Return the content of the file of checksums, and the root."""
        first = bytes(self._sums) + _sums(memoryview(self._rest), BLOCK_BYTES)
        second = _sums(memoryview(first), PAGE_BYTES)
        return first + second, root_of(second, self._size_bytes)


class Blocks:
    """Compares the blocks of `file` with their checksums."""

    def __init__(self, file: Path, root: str) -> None:
        self.file, self.root = file, root
        self._size_bytes = file.stat().st_size
        # A partial instead of a method: a cache with a reference to `self` is a cycle, which is freed late.
        self._page = lru_cache(CACHED_PAGES)(partial(_page, _Pages(file, root, self._size_bytes)))

    def require(self, data: bytes, block: int) -> None:
        """Raise UserError if `data`, which starts with the block of this number, differs from its checksums.

        `data` ends at the end of a block or of the file. The caller must use these bytes and not read them again.
        """
        page, at = divmod(block * SUM_BYTES, PAGE_BYTES)
        sums = self._page(page)
        if len(data) <= BLOCK_BYTES:  # a number, or a short document
            if xxh3_64_digest(data) != sums[at : at + SUM_BYTES]:
                raise self._damage(block)
            return
        view = memoryview(data)
        for start in range(0, len(data), BLOCK_BYTES):
            if at == PAGE_BYTES:
                page, at = page + 1, 0
                sums = self._page(page)
            if xxh3_64_digest(view[start : start + BLOCK_BYTES]) != sums[at : at + SUM_BYTES]:
                raise self._damage(block + start // BLOCK_BYTES)
            at += SUM_BYTES

    def _damage(self, block: int) -> UserError:
        first = block * BLOCK_BYTES
        last = min(first + BLOCK_BYTES, self._size_bytes) - 1
        return damage(self.file, f"block {block} (bytes {first} to {last}) differs from its checksum")


class _Pages:
    """The file of checksums. It is opened for each page, because a store has hundreds of files open already."""

    def __init__(self, file: Path, root: str, size_bytes: int) -> None:
        self.file, self._root, self._data_bytes = file.with_name(file.name + SUFFIX), root, size_bytes
        self.first_bytes = -(-size_bytes // BLOCK_BYTES) * SUM_BYTES

    @cached_property
    def second(self) -> bytes:
        """The checksums of all pages, compared with the root."""
        size = -(-self.first_bytes // PAGE_BYTES) * SUM_BYTES
        second = self.read(self.first_bytes, size + 1)
        if root_of(second, self._data_bytes) != self._root:
            raise damage(self.file, "its own checksum differs")
        return second

    def read(self, start: int, size: int) -> bytes:
        try:
            descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise damage(self.file, "it is missing") from None
        try:
            return os.pread(descriptor, size, start)
        finally:
            os.close(descriptor)


def _page(pages: _Pages, number: int) -> bytes:
    """Return a page of checksums. Raise UserError if it differs from its own checksum."""
    start = number * PAGE_BYTES
    found = pages.read(start, min(PAGE_BYTES, pages.first_bytes - start))
    if xxh3_64_digest(found) != pages.second[number * SUM_BYTES : (number + 1) * SUM_BYTES]:
        raise damage(pages.file, f"bytes {start} to {start + len(found) - 1} differ from their checksum")
    return found


def damage(file: Path, why: str) -> UserError:
    """Return the error for a damaged file of a unit or of a packing plan."""
    return UserError(
        "E-DATA-001",
        f"{file} is damaged",
        why=why,
        fix=f"remove its folder and run the same command again, which rebuilds only that folder: rm -r {file.parent}",
    )


def _sums(data: memoryview, size: int) -> bytes:
    return b"".join([xxh3_64_digest(data[n : n + size]) for n in range(0, len(data), size)])


def root_of(second: bytes, size_bytes: int) -> str:
    """Return the root: a checksum of the second part of a file of checksums, and of the size of the data."""
    return xxh3_64_hexdigest(second + size_bytes.to_bytes(8, "little"))
