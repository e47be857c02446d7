"""The geometry of a file with checksums, and the comparison of its parts (`forerun.data.blocks` defines the format).

Three kinds of parts are read: the second part of `NAME.sums`, pages of checksums, and blocks of data. The positions of
all of them follow from the size of the file, so a reader asks for them at the same time. Each kind is compared with the
kind before it, and the second part with the root.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

from forerun.data.blocks import BLOCK_BYTES, PAGE_BLOCKS, PAGE_BYTES, SUFFIX, SUM_BYTES, root_of
from forerun.storage.folder import FileRange

SECOND, PAGE, BLOCK = range(3)  # kinds of parts, in the order in which they are compared


class SummedFile:
    """A file of a store: its name, its size and the root of its checksums. Nothing is read."""

    def __init__(self, name: str, size_bytes: int, root: str) -> None:
        self.name, self.size_bytes, self.root = name, size_bytes, root
        self.blocks = -(-size_bytes // BLOCK_BYTES)
        self.first_bytes = self.blocks * SUM_BYTES
        self.pages = -(-self.first_bytes // PAGE_BYTES)
        self.sums_bytes = self.first_bytes + self.pages * SUM_BYTES

    @cached_property
    def keys(self) -> tuple[bytes, bytes, bytes]:
        """The keys of the second part, the pages and the data in a cache of blocks."""
        return (
            xxh3_128_digest(f"{self.name}{SUFFIX} second {self.root}".encode()),
            xxh3_128_digest(f"{self.name}{SUFFIX} {self.root}".encode()),
            xxh3_128_digest(f"{self.name} {self.root}".encode()),
        )

    @cached_property
    def _hash(self) -> int:
        return hash(self.keys)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, SummedFile) and self.keys == other.keys)


class SummedPart(NamedTuple):
    """A part of a file: its kind and its number. The second part is one part, with the number 0."""

    file: SummedFile
    kind: int
    number: int

    @property
    def range(self) -> FileRange:
        """Where the part lies."""
        file, number = self.file, self.number
        if self.kind == BLOCK:
            start = number * BLOCK_BYTES
            return FileRange(file.name, start, min(start + BLOCK_BYTES, file.size_bytes))
        if self.kind == PAGE:
            start = number * PAGE_BYTES
            return FileRange(file.name + SUFFIX, start, min(start + PAGE_BYTES, file.first_bytes))
        return FileRange(file.name + SUFFIX, file.first_bytes, file.sums_bytes)

    @property
    def parent(self) -> SummedPart | None:
        """The part with the checksum of this one; None for the second part, whose checksum is the root."""
        if self.kind == BLOCK:
            return SummedPart(self.file, PAGE, self.number // PAGE_BLOCKS)
        return SummedPart(self.file, SECOND, 0) if self.kind == PAGE else None

    def is_intact(self, data: bytes, parent: bytes) -> bool:
        """Return whether `data` is this part. `parent` is the content of the part with its checksum."""
        if self.kind == SECOND:
            return root_of(data, self.file.size_bytes) == self.file.root
        at = self.number % PAGE_BLOCKS * SUM_BYTES if self.kind == BLOCK else self.number * SUM_BYTES
        return xxh3_64_digest(data) == parent[at : at + SUM_BYTES]


class BlockRange(NamedTuple):
    """The blocks `first` .. `stop - 1` of a file.

    If one of them is missing, the blocks `around_first` .. `around_stop - 1` are fetched, which include them. If
    `is_kept`, blocks that were fetched stay in memory for a while.
    """

    file: SummedFile
    first: int
    stop: int
    around_first: int
    around_stop: int
    is_kept: bool = False
