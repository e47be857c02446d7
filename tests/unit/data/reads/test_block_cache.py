"""The content of the block cache: what is found again, what is replaced, and that wrong bytes are never accepted."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import cached_reads
import pytest
from cached_reads import CheckingCaller, StoredFile
from recording_reporter import FailingReporter

from forerun.data.blocks import BLOCK_BYTES
from forerun.data.reads.block_cache import BlockCache
from forerun.data.reads.cache_file import LINE_BLOCKS, LINE_BYTES, WAYS, geometry_within
from forerun.data.reads.read_counts import ReadCounts

ONE_SET = 8192 + WAYS * LINE_BYTES  # header, entries and the lines of one set


class Clock:
    """A clock that each reading advances by a second."""

    def __init__(self) -> None:
        self.seconds = 1.8e9

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def cache_at(file: Path, limit_bytes: int, clock: Clock | None = None) -> BlockCache:
    return BlockCache(file, limit_bytes, ReadCounts(), FailingReporter(), clock=clock or Clock())


def processes(*arguments: Sequence[object]) -> list[dict[str, object]]:
    """Run `cached_reads.py` once with each list of arguments, all at the same time."""
    command = [sys.executable, "-P", cached_reads.__file__]
    running = [
        subprocess.Popen([*command, *map(str, one)], stdout=subprocess.PIPE, text=True, env=os.environ)
        for one in arguments
    ]
    found = [json.loads(one.communicate()[0]) for one in running]
    assert [one.returncode for one in running] == [0] * len(running)
    return found


def test_what_was_put_is_found_in_any_pieces(tmp_path: Path) -> None:
    """A dict is the oracle. The cache has room for everything, and the last block of a file is short."""
    cache, draw = cache_at(tmp_path / "cache", 16 << 20), random.Random(1)
    files = [StoredFile(f"file {number}", 70) for number in range(3)]
    held: dict[tuple[bytes, int], bytes] = {}
    for _ in range(400):
        file, block = draw.choice(files), draw.randrange(70)
        count = min(draw.choice([1, 2, 3, 40]), 70 - block)
        if draw.random() < 0.3:
            cache.put(file.key, block, file.block(block, count))
            held |= {(file.key, one): file.block(one) for one in range(block, block + count)}
        wanted = [held.get((file.key, one)) for one in range(block, block + count)]
        assert cache.get(file.key, block, count) == wanted
        runs = cache.runs(file.key, block, count)
        assert b"".join(data for _, data in runs) == b"".join(one for one in wanted if one is not None)
    assert len(held[files[0].key, 69]) == BLOCK_BYTES - 1000


def test_a_block_number_of_the_largest_store_is_possible(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache", 4 << 20)
    last = (60 << 40) // BLOCK_BYTES
    cache.put(b"\xff" * 16, last, bytes(5000))
    assert cache.get(b"\xff" * 16, last - 1, 4) == [None, bytes(4096), bytes(904), None]
    assert cache.get(b"\xff" * 16, last, 0) == []


def test_another_process_finds_the_blocks(tmp_path: Path) -> None:
    first = processes([tmp_path / "cache", 8 << 20, "shared", 500, 1, 1])[0]
    second = CheckingCaller(cache_at(tmp_path / "cache", 8 << 20), StoredFile("shared", 500))
    assert first["misses"] == 500
    assert second.read_all(2, 1) == 0
    assert (second.misses, second.damaged) == (0, 0)


def test_the_least_recently_used_line_of_a_set_is_replaced(tmp_path: Path) -> None:
    """An OrderedDict of lines is the oracle: reading and writing make a line the newest one."""
    cache, draw = cache_at(tmp_path / "cache", ONE_SET), random.Random(2)
    assert geometry_within(ONE_SET).sets == 1  # type: ignore[union-attr]
    newest: OrderedDict[int, None] = OrderedDict()
    file = StoredFile("lines", 40 * LINE_BLOCKS)
    for _ in range(600):
        line = int(draw.triangular(0, 40, 0))
        block = line * LINE_BLOCKS + draw.randrange(LINE_BLOCKS - 1)
        if draw.random() < 0.5:
            cache.put(file.key, block, file.block(block))
            newest[line] = None
        elif line in newest:
            cache.get(file.key, block, 1)
        if line in newest:
            newest.move_to_end(line)
        if len(newest) > WAYS:
            newest.popitem(last=False)
        assert _lines(tmp_path / "cache", file.key) == set(newest)


def _lines(cache: Path, key: bytes) -> set[int]:
    """Return which of the lines 0 to 39 have an entry. Asking the cache would change the order."""
    with open(cache, "rb") as file:
        file.seek(4096)
        entries = file.read(WAYS * 16)
    tags = {int.from_bytes(entries[at : at + 8], "little") for at in range(0, len(entries), 16)}
    tag = int.from_bytes(key[8:], "little")
    return {line for line in range(40) if (tag + line * 0x9E3779B97F4A7C15) % 2**64 in tags}


def test_a_clock_that_goes_back_does_not_stop_the_replacement(tmp_path: Path) -> None:
    clock = Clock()
    cache, file = cache_at(tmp_path / "cache", ONE_SET, clock), StoredFile("lines", 99 * LINE_BLOCKS)
    for line in range(WAYS):
        cache.put(file.key, line * LINE_BLOCKS, file.block(line * LINE_BLOCKS))
    clock.seconds -= 86400
    for line in range(50, 50 + WAYS):
        cache.put(file.key, line * LINE_BLOCKS, file.block(line * LINE_BLOCKS))
    new = [cache.get(file.key, line * LINE_BLOCKS, 1)[0] for line in range(50, 50 + WAYS)]
    assert None not in new


@pytest.mark.parametrize("limit_bytes", [0, 1, 70_000, 300_000, 2 << 20, 5_000_001])
def test_the_file_is_never_larger_than_its_limit(tmp_path: Path, limit_bytes: int) -> None:
    cache = cache_at(tmp_path / "cache", limit_bytes)
    for number in range(20):
        file = StoredFile(str(number), 200)
        cache.put(file.key, 0, file.data)
        about = os.stat(tmp_path / "cache") if limit_bytes >= 70_000 else None
        assert about is None or max(about.st_size, about.st_blocks * 512) <= limit_bytes
    if limit_bytes < 70_000:  # not even one line
        assert list(tmp_path.iterdir()) == []
        assert cache.get(bytes(16), 0, 2) == [None, None]


def test_blocks_of_another_file_in_the_place_of_a_line_are_refused_and_replaced(tmp_path: Path) -> None:
    """An entry of one line with the bytes of another: what two processes that write at once can leave."""
    file, other = StoredFile("right", 64), StoredFile("other", 64)
    cache = cache_at(tmp_path / "cache", 8 << 20)
    cache.put(file.key, 0, file.data)
    content = (tmp_path / "cache").read_bytes()
    assert content.count(file.block(5)) == 1
    (tmp_path / "cache").write_bytes(content.replace(file.block(5), other.block(5)))
    caller = CheckingCaller(cache, file)
    assert caller.read(0, 64) == file.data
    assert (caller.hits, caller.damaged, caller.misses) == (63, 1, 0)
    assert caller.read(0, 64) == file.data  # the second read finds the repaired block
    assert (caller.hits, caller.damaged, caller.misses) == (127, 1, 0)


def test_random_bytes_in_the_file_are_refused(tmp_path: Path) -> None:
    """Bytes of entries and of lines change at random; neither get nor put raises, and no wrong row is accepted."""
    draw, file = random.Random(3), StoredFile("fuzz", 120)
    cache = cache_at(tmp_path / "cache", 2 << 20)
    caller = CheckingCaller(cache, file)
    shape = geometry_within(2 << 20)
    assert shape is not None
    with open(tmp_path / "cache", "r+b", buffering=0) as raw:
        for seed in range(40):
            os.pwrite(raw.fileno(), draw.randbytes(9000), draw.randrange(4096, shape.size_bytes - 9000))
            for _ in range(30):
                entry = draw.randrange(shape.sets * shape.set_bytes)
                os.pwrite(raw.fileno(), draw.randbytes(draw.choice([1, 2, 16])), 4096 + entry)
            assert caller.read_all(seed, 1) == 0
    assert caller.hits > 0
    assert caller.damaged > 0


def test_processes_that_write_the_same_sets_never_accept_wrong_bytes(tmp_path: Path) -> None:
    """Four processes, three files, one set: every line is replaced by others all the time. Two share a file."""
    names = ["a", "b", "c", "a"]
    arguments = [[tmp_path / "cache", ONE_SET, name, 300, seed, 6] for seed, name in enumerate(names)]
    found = processes(*arguments)
    assert [one["wrong"] for one in found] == [0] * 4
    assert [(one["told"], one["errors"]) for one in found] == [([], 0)] * 4
    assert all(one["largest"] <= ONE_SET for one in found)  # type: ignore[operator]


def test_a_store_larger_than_the_cache_does_not_stop_its_readers(tmp_path: Path) -> None:
    """The condition of mosaicml/streaming issue 339: two processes read a store of five times the cache, twice."""
    limit_bytes = 1 << 20
    found = processes(*([tmp_path / "cache", limit_bytes, "store", 1280, seed, 2] for seed in (1, 2)))
    for one in found:
        assert one["wrong"] == 0
        assert one["misses"] > 1280  # type: ignore[operator]  # it did not fit
        assert 0 < one["largest"] <= limit_bytes  # type: ignore[operator]
        assert (one["told"], one["errors"]) == ([], 0)
