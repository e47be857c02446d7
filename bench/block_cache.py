"""Cost of the local block cache: hits against plain pread of the same bytes, in turns, and how many rows fit.

    python bench/block_cache.py [--folder FOLDER] [--rounds 15]

256 MiB lie in a cache file and in a plain file, both in the page cache of the system. Each round reads the same random
places from both: rows of 8 KiB, which lie in 3 blocks (12 KiB), and extents of 512 KiB and of 4 MiB. The figures are
medians of CPU time over the rounds.
`get, new time of use` is a hit that must also write when the line was last used, because that was in an earlier second.

The second part simulates sizes of lines: the share of the cache that rows of 3 blocks at random places can use, and the
hits of blocks if a store of twice the cache is read in random order in each epoch.
Writes bench/results/block_cache.json and block_cache.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from forerun.data.blocks import BLOCK_BYTES
from forerun.data.reads.block_cache import LINE_BLOCKS, BlockCache
from forerun.data.reads.patient_reads import ReadCounts
from forerun.reporter import LineReporter

ROOT = Path(__file__).parent
SIZE_BYTES = 256 << 20
ROW_BYTES = 8192
READS = {"row of 3 blocks": (3, 4000), "extent of 512 KiB": (128, 200), "extent of 4 MiB": (1024, 40)}
KEY = xxh3_128_digest(b"bench")


class SetClock:
    """A clock that the bench advances, so that a line was or was not used in the same second."""

    seconds = 1.8e9

    def __call__(self) -> float:
        return self.seconds


def measure(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Return CPU microseconds by reads and by the way to read them."""
    clock = SetClock()
    cache = BlockCache(folder / "cache", 2 * SIZE_BYTES, ReadCounts(), LineReporter(sys.stdout), clock=clock)
    data = os.urandom(SIZE_BYTES)
    for start in range(0, SIZE_BYTES, 4 << 20):
        cache.put(KEY, start // BLOCK_BYTES, data[start : start + (4 << 20)])
    descriptor = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, data, 0)

    def later(block: int, count: int) -> None:
        clock.seconds += 1
        cache.get(KEY, block, count)

    ways: dict[str, Callable[[int, int], Any]] = {
        "pread": lambda block, count: os.pread(descriptor, count * BLOCK_BYTES, block * BLOCK_BYTES),
        "get": lambda block, count: cache.get(KEY, block, count),
        "get, new time of use": later,
        "entries": lambda block, count: os.pread(descriptor, -(-count // LINE_BLOCKS) * 256, 4096),
        "pwrite": lambda block, count: os.pwrite(
            descriptor, data[block * BLOCK_BYTES : (block + count) * BLOCK_BYTES], block * BLOCK_BYTES
        ),
        "put": lambda block, count: cache.put(KEY, block, data[block * BLOCK_BYTES : (block + count) * BLOCK_BYTES]),
    }
    draw, found = random.Random(0), {}
    for name, (count, reads) in READS.items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            step = 1 if count == 3 else count
            places = [draw.randrange((SIZE_BYTES // BLOCK_BYTES - count) // step) * step for _ in range(reads)]
            for way, read in ways.items():
                read(0, count)  # the time of last use is new
                began = time.process_time()
                for place in places:
                    read(place, count)
                seconds[way].append((time.process_time() - began) / reads)
        found[name] = {way: round(1e6 * statistics.median(values), 2) for way, values in seconds.items()}
    os.close(descriptor)
    return found


def simulated(line_blocks: int, store_blocks: int = 30_000) -> tuple[float, float]:
    """Return the blocks of the cache that a row takes, and the share of hits with a cache of half the store."""
    draw, held, hits, reads = random.Random(0), OrderedDict[int, set[int]](), 0, 0
    rows = list(range(store_blocks * BLOCK_BYTES // ROW_BYTES))
    lines_of_rows = []
    for epoch in range(3):
        draw.shuffle(rows)
        for row in rows:
            start = row * ROW_BYTES + 100  # a row does not start with a block
            blocks = range(start // BLOCK_BYTES, (start + ROW_BYTES) // BLOCK_BYTES + 1)
            lines_of_rows.append(len({block // line_blocks for block in blocks}))
            for block in blocks:
                line = held.setdefault(block // line_blocks, set())
                held.move_to_end(block // line_blocks)
                hits += epoch > 0 and block in line
                reads += epoch > 0
                line.add(block)
                if len(held) > store_blocks // 2 // line_blocks:
                    held.popitem(last=False)
    return statistics.mean(lines_of_rows) * line_blocks, hits / reads


def table(found: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["# Local block cache", "", f"{found['machine']}, lines of {LINE_BLOCKS} blocks, CPU time, medians.", ""]
    ways = list(next(iter(found["microseconds"].values())))
    lines += ["| read | " + " | ".join(f"{way} (µs)" for way in ways) + " | blocks/s of get | get / pread |"]
    lines += ["|---" * (len(ways) + 3) + "|"]
    for name, times in found["microseconds"].items():
        rate, ratio = READS[name][0] / times["get"] * 1e6, times["get"] / times["pread"]
        lines.append(
            f"| {name} | " + " | ".join(f"{times[way]:.4g}" for way in ways) + f" | {rate:,.0f} | {ratio:.2g} |"
        )
    lines += [
        "",
        "| blocks of a line | blocks that a random row takes | hits, cache of half the store |",
        "|---|---|---|",
    ]
    lines += [f"| {size} | {taken:.3g} | {hits:.3f} |" for size, (taken, hits) in found["lines"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        microseconds = measure(Path(folder), args.rounds)
    found = {
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
        "microseconds": microseconds,
        "lines": {size: simulated(size) for size in (1, 2, 4, 8, 16)},
    }
    (ROOT / "results" / "block_cache.json").write_text(json.dumps(found, indent=1) + "\n")
    (ROOT / "results" / "block_cache.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
