"""The content of the block cache: what is found again, what is replaced, and that wrong bytes are never accepted."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cached_reads
import pytest
from cached_reads import CheckingCaller, StoredFile
from recording_reporter import FailingReporter, RecordingReporter

from forerun.data.blocks import BLOCK_BYTES
from forerun.data.reads.block_cache import (
    ENTRY,
    HEADER_BYTES,
    LINE_BLOCKS,
    LINE_BYTES,
    WAYS,
    BlockCache,
    geometry_within,
    stored_geometry,
)
from forerun.data.reads.patient_reads import ReadCounts

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
    command = [sys.executable, cached_reads.__file__]
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
        found = cache.get(file.key, block, count)
        assert [one and one[: len(file.block(number))] for number, one in enumerate(found, block)] == wanted
    assert len(held[files[0].key, 69]) == BLOCK_BYTES - 1000


def test_a_block_number_of_the_largest_store_is_possible(tmp_path: Path) -> None:
    cache = cache_at(tmp_path / "cache", 4 << 20)
    last = (60 << 40) // BLOCK_BYTES
    cache.put(b"\xff" * 16, last, bytes(5000))
    assert cache.get(b"\xff" * 16, last - 1, 4) == [None, bytes(4096), bytes(4096), None]
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


LIMIT = 8 << 20
FILE = StoredFile("file", 200)


class World:
    """A cache with a clock that the test sets, and a caller that compares checksums."""

    def __init__(self, file: Path, limit_bytes: int = LIMIT) -> None:
        self.seconds = 1.8e9
        self.counts, self.told = ReadCounts(), list[str]()
        self.cache = BlockCache(
            file, limit_bytes, self.counts, RecordingReporter(self.told), clock=lambda: self.seconds
        )
        self.caller = CheckingCaller(self.cache, FILE)

    @property
    def errors(self) -> int:
        return self.counts.cache_errors

    def require(self, wanted: str) -> None:
        """Read all blocks at once and compare them: all from the cache (`hits`), or none (`misses`)."""
        before = vars(self.caller).copy()
        assert self.caller.read(0, FILE.blocks) == FILE.data
        new = {name: getattr(self.caller, name) - before[name] for name in ("hits", "misses", "damaged")}
        assert new == {"hits": 0, "misses": 0, "damaged": 0} | {wanted: FILE.blocks}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a file system needs the permission of root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def remove_file(file: Path) -> None:
    file.unlink()


def remove_folder(file: Path) -> None:
    shutil.rmtree(file.parent)


@pytest.mark.parametrize("remove", [remove_file, remove_folder])
def test_a_removed_cache_is_created_again(tmp_path: Path, remove: Callable[[Path], None]) -> None:
    world = World(tmp_path / "blocks" / "cache")
    world.require("misses")
    world.require("hits")
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(1, 4):
        remove(world.cache.file)
        world.require("misses")
        world.require("hits")
        assert world.errors == number
    assert len(world.told) == 1
    assert "E-DATA-185" in world.told[0]
    assert str(world.cache.file) in world.told[0]
    assert len(os.listdir("/proc/self/fd")) == descriptors  # the space of removed files is free


@pytest.mark.parametrize("size", [0, 17, 4096, 5000, 300_000])
def test_a_cut_file_is_a_miss(tmp_path: Path, size: int) -> None:
    """Also the header may be missing: the geometry stays in memory."""
    world = World(tmp_path / "cache")
    world.require("misses")
    os.truncate(tmp_path / "cache", size)
    assert world.caller.read_all(1, 1) == 0
    world.require("hits")
    assert (world.errors, world.told) == (0, [])


def test_a_file_that_is_cut_in_an_entry_is_a_miss(tmp_path: Path) -> None:
    """The tag of the first entry is complete, and what follows it is not."""
    world = World(tmp_path / "cache")
    world.require("misses")
    entries = (tmp_path / "cache").read_bytes()[HEADER_BYTES:]
    first = next(at for at in range(0, len(entries), ENTRY.size) if any(entries[at : at + 8]))
    os.truncate(tmp_path / "cache", HEADER_BYTES + first + 10)
    world.require("misses")
    assert (world.errors, world.told) == (0, [])


def test_a_file_without_header_is_replaced_by_the_next_process(tmp_path: Path) -> None:
    first = World(tmp_path / "cache")
    os.truncate(tmp_path / "cache", 0)
    second = World(tmp_path / "cache")
    assert stored_geometry(tmp_path / "cache") == geometry_within(LIMIT)
    second.require("misses")
    first.require("hits")  # both use the new file
    assert (first.errors, second.errors) == (1, 0)


def test_a_foreign_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"something else" * 1000)
    world = World(tmp_path / "cache")
    world.require("misses")
    world.require("hits")
    assert (world.errors, world.told) == (0, [])


def test_a_full_disk_is_reported_once_and_used_again_later(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(100_000))
    world = World(small_disk / "cache")
    assert world.caller.read_all(1, 1) == 0
    assert world.caller.hits > 0
    assert world.errors == 1  # writing pauses
    assert len(world.told) == 1
    assert os.strerror(errno.ENOSPC) in world.told[0]
    assert "E-DATA-185" in world.told[0]
    for _ in range(20):
        world.seconds += 100
        assert world.caller.read_all(1, 1) == 0
    assert world.errors == 21
    assert len(world.told) == 1
    (small_disk / "other").unlink()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    world.seconds += 100
    world.caller.read(0, FILE.blocks)
    world.require("hits")


def test_blocks_of_a_disk_that_becomes_read_only_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of last use cannot be written. A file system with an open file cannot be made read-only in a test."""
    world = World(tmp_path / "cache")
    world.require("misses")

    def failing(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "pwrite", failing)
    world.seconds += 1
    world.require("hits")
    world.require("hits")
    assert (world.errors, len(world.told)) == (1, 1)


@pytest.mark.parametrize("is_read_only", [True, False])
def test_a_folder_that_cannot_be_created_is_reported(small_disk: Path, is_read_only: bool) -> None:
    if is_read_only:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        file, reason = small_disk / "blocks" / "cache", errno.EROFS
    else:
        (small_disk / "blocks").write_text("a file")
        file, reason = small_disk / "blocks" / "cache", errno.EEXIST
    world = World(file)
    world.require("misses")
    assert world.errors == 1
    assert os.strerror(reason) in world.told[0]
    if is_read_only:
        subprocess.run(["mount", "-o", "remount,rw,size=4m", str(small_disk)], check=True)
        world.require("misses")  # still in the pause
        world.seconds += 1
        world.require("misses")
        world.require("hits")
        assert (world.errors, len(world.told)) == (1, 1)


@pytest.mark.parametrize("call", ["pread", "pwrite", "fstat"])
def test_an_error_of_the_disk_does_not_change_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The cache tries again after pauses of 1, 2, 4 ... 60 seconds."""
    world = World(tmp_path / "cache")
    world.require("misses")

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        world.seconds += 1  # a new time of last use
        for _ in range(600):
            assert world.caller.read(0, FILE.blocks) == FILE.data
            world.seconds += 1
        assert 10 <= world.errors <= 40
        assert 1 <= len(world.told) <= 2
        assert all(os.strerror(errno.EIO) in text and "E-DATA-185" in text for text in world.told)
    world.seconds += 60
    world.caller.read(0, FILE.blocks)
    world.require("hits")


def test_threads_read_while_the_file_is_removed(tmp_path: Path) -> None:
    """A descriptor is closed after its last use only. Otherwise a thread could write into another file."""
    world = World(tmp_path / "cache")
    wrong = []
    threads = [
        threading.Thread(target=lambda seed=seed: wrong.append(world.caller.read_all(seed, 1))) for seed in range(3)
    ]
    for thread in threads:
        thread.start()
    removed = 0
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "cache").exists():
            (tmp_path / "cache").unlink(missing_ok=True)
            removed += 1
        with open(tmp_path / f"other-{removed % 9}", "wb"):  # takes the number of a closed descriptor
            pass
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0]
    assert removed > 0
    assert {file.stat().st_size for file in tmp_path.glob("other-*")} == {0}


def test_a_run_with_another_limit_uses_the_size_of_the_first_one(tmp_path: Path) -> None:
    first = World(tmp_path / "cache", 4 << 20)
    second = World(tmp_path / "cache", 64 << 20)
    size = geometry_within(4 << 20).size_bytes  # type: ignore[union-attr]
    assert (first.cache.size_bytes, second.cache.size_bytes) == (size, size)
    assert len(second.told) == 1
    assert (first.told, second.errors) == ([], 0)
    first.require("misses")
    second.require("hits")


def test_the_size_changes_when_no_run_uses_the_file(tmp_path: Path) -> None:
    world = World(tmp_path / "cache", 4 << 20)
    world.require("misses")
    inode = (tmp_path / "cache").stat().st_ino
    del world
    gc.collect()  # its clock is a cycle
    smaller = World(tmp_path / "cache", 4 * LINE_BYTES)
    assert (tmp_path / "cache").stat().st_size < LINE_BYTES  # the old lines are gone
    assert (tmp_path / "cache").stat().st_ino == inode
    assert smaller.caller.read_all(1, 1) == 0
    assert (tmp_path / "cache").stat().st_size <= 4 * LINE_BYTES
    assert smaller.told == []
