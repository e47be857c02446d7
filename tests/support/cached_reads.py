"""A caller of the block cache that compares every block with its checksum, as readers of a store must.

As a program, it reads a file in random order and prints a line of JSON. The file's bytes are a function of its name.
`python cached_reads.py CACHE LIMIT NAME BLOCKS SEED PASSES`
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import cached_property
from hashlib import blake2b, shake_128
from pathlib import Path

from recording_reporter import RecordingReporter
from xxhash import xxh3_128_digest

from forerun.data.blocks import BLOCK_BYTES
from forerun.data.reads.block_cache import BlockCache
from forerun.data.reads.patient_reads import ReadCounts


class StoredFile:
    """A file whose bytes are a function of its name. The last block is shorter than the others."""

    def __init__(self, name: str, blocks: int) -> None:
        self.key = xxh3_128_digest(name.encode())
        self.data = shake_128(name.encode()).digest(blocks * BLOCK_BYTES - 1000)
        self.blocks = blocks

    def block(self, number: int, count: int = 1) -> bytes:
        return self.data[number * BLOCK_BYTES : (number + count) * BLOCK_BYTES]

    @cached_property
    def sums(self) -> list[bytes]:
        return [blake2b(self.block(number)).digest() for number in range(self.blocks)]


class CheckingCaller:
    """Reads a file through the cache. What the cache does not have, or has wrong, comes from the file."""

    def __init__(self, cache: BlockCache, file: StoredFile) -> None:
        self.cache, self.file = cache, file
        self.hits = self.misses = self.damaged = 0

    def read(self, number: int, count: int) -> bytes:
        found = []
        for at, block in enumerate(self.cache.get(self.file.key, number, count), number):
            content = None if block is None else block[: len(self.file.block(at))]  # the last block is shorter
            if content is not None and blake2b(content).digest() == self.file.sums[at]:
                self.hits += 1
                found.append(content)
                continue
            self.damaged += block is not None
            self.misses += block is None
            found.append(self.file.block(at))
            self.cache.put(self.file.key, at, found[-1])
        return b"".join(found)

    def read_all(self, seed: int, passes: int, after: Callable[[], None] = lambda: None) -> int:
        """Read the file in random order, rows of 2 to 5 blocks. Return the number of wrong rows that were accepted."""
        draw, wrong = random.Random(seed), 0
        for _ in range(passes):
            starts = list(range(0, self.file.blocks, 2))
            draw.shuffle(starts)
            for start in starts:
                count = min(draw.randint(2, 5), self.file.blocks - start)
                wrong += self.read(start, count) != self.file.block(start, count)
                after()
        return wrong


def main(cache: str, limit: str, name: str, blocks: str, seed: str, passes: str) -> None:
    told: list[str] = []
    counts = ReadCounts()
    file, limit_bytes = Path(cache), int(limit)
    caller = CheckingCaller(
        BlockCache(file, limit_bytes, counts, RecordingReporter(told)), StoredFile(name, int(blocks))
    )
    largest = 0

    def measure() -> None:
        nonlocal largest
        about = file.stat()
        largest = max(largest, about.st_size, about.st_blocks * 512)

    wrong = caller.read_all(int(seed), int(passes), measure)
    found = {name: vars(caller)[name] for name in ("hits", "misses", "damaged")}
    print(json.dumps({"wrong": wrong, "largest": largest, "told": told, "errors": counts.cache_errors} | found))


if __name__ == "__main__":
    main(*sys.argv[1:])
