"""A cache whose disk is full or fails, or whose file is removed or cut: the caller still gets every byte."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cached_reads import CheckingCaller, StoredFile
from recording_reporter import RecordingReporter

from forerun.data.reads.block_cache import BlockCache
from forerun.data.reads.cache_file import ENTRY, HEADER_BYTES, LINE_BYTES, geometry_within, stored_geometry
from forerun.data.reads.read_counts import ReadCounts

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
