"""Reads of a bucket return the bytes of the file, whatever the bucket and the cache answer, or raise a named error."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from folder_stand_in import MemoryCache, StandIn, write_array
from recording_reporter import RecordingReporter

from forerun.data.reads import patient_reads
from forerun.data.reads.block_cache import LINE_BYTES, BlockCache, stored_geometry
from forerun.data.reads.block_reader import BlockReader, ByteLimit, ReadMemory, Recent
from forerun.data.reads.bucket_array import ArrayPart, BucketArray, read_parts
from forerun.data.reads.patient_reads import ReadCounts, merged
from forerun.errors import StorageError, UserError
from forerun.storage import retries
from forerun.storage.folder import FileRange
from forerun.storage.retries import READS

NUMBERS = np.random.default_rng(0).integers(0, 60_000, 3_000_000).astype("<u2")  # 6 MB: three pages of checksums
LARGE = np.random.default_rng(1).integers(0, 60_000, 20_000_000).astype("<u2")  # its checksums are above 64 KiB


class Rig:
    def __init__(self, path: Path, numbers: np.ndarray, cache: Any = None, **options: Any) -> None:
        self.folder, self.counts, self.cache = StandIn(path), ReadCounts(), cache
        self.root = write_array(path / "unit/a.tokens", numbers)
        self.numbers, self.options = numbers, options
        self.again()

    def again(self) -> BucketArray:
        """Return the array of a new process: its memory is empty."""
        self.reader = BlockReader(self.folder, self.cache, self.counts, ReadMemory())
        dtype, count = self.numbers.dtype, len(self.numbers)
        self.array = BucketArray(self.reader, "unit/a.tokens", dtype, count, self.root, **self.options)
        return self.array

    def require_equal(self, start: int, stop: int) -> None:
        assert np.array_equal(self.array.read(start, stop), self.numbers[start:stop])

    def ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """Return several ranges, which are fetched at the same time."""
        return read_parts([ArrayPart(self.array, start, stop) for start, stop in zip(starts, stops, strict=True)])


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which only advance the clock."""
    seconds: list[float] = []
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=lambda: sum(seconds), sleep=seconds.append))
    return seconds


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("large"), LARGE)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, NUMBERS, MemoryCache())


def test_ranges_of_a_batch_need_one_round_trip_with_their_checksums(large: Rig) -> None:
    large.again()
    large.folder.calls.clear()
    chance = np.random.default_rng(2)
    starts = [0, len(LARGE) - 1, 5_000_000, 5_000_100, *chance.integers(0, len(LARGE) - 3000, 60).tolist()]
    stops = [min(start + 2049, len(LARGE)) for start in starts]
    for start, stop, found in zip(starts, stops, large.ranges(starts, stops), strict=True):
        assert np.array_equal(found, LARGE[start:stop])
    assert len(large.folder.calls) == 1
    assert large.ranges(starts, stops)[3][0] == LARGE[starts[3]]
    assert not [one for one in large.folder.calls[1] if one.name.endswith(".sums")], "checksums stay in memory"
    assert large.counts.requests == sum(map(len, large.folder.calls))


def test_ends_and_empty_ranges(rig: Rig) -> None:
    for start, stop in ((0, 0), (0, 1), (2047, 2049), (len(NUMBERS) - 1, len(NUMBERS)), (0, len(NUMBERS))):
        rig.require_equal(start, stop)
    assert rig.ranges([], []) == []


def test_a_second_process_reads_everything_from_the_cache(rig: Rig) -> None:
    rig.require_equal(1_000_000, 1_300_000)
    rig.folder.calls.clear()
    rig.again()
    rig.require_equal(1_000_000, 1_300_000)
    assert rig.folder.calls == []
    assert rig.counts.cache_hits == 147  # 600,000 bytes from byte 2,000,000: blocks 488 to 634
    assert rig.counts.cache_misses == 147


@pytest.mark.parametrize("part", ["second", "page", "block"])
def test_a_cached_part_that_differs_is_fetched(rig: Rig, part: str) -> None:
    rig.require_equal(0, 4096)
    assert rig.cache is not None
    keys = dict(zip(("second", "page", "block"), rig.array.file.keys, strict=True))
    for key, data in rig.cache.blocks.items():
        if key == (keys[part], 0):
            rig.cache.blocks[key] = bytes([data[0] ^ 1]) + data[1:]
    rig.again()
    rig.require_equal(0, 4096)
    assert (rig.counts.cache_damaged, rig.counts.damaged_blocks) == (1, 0)
    rig.again()
    rig.require_equal(0, 4096)
    assert rig.counts.cache_damaged == 1, "the cache was repaired"


def test_a_cached_last_block_with_padding_is_used(rig: Rig) -> None:
    """A cache of whole blocks may not know where the file ends."""
    rig.require_equal(len(NUMBERS) - 5, len(NUMBERS))
    for key, data in rig.cache.blocks.items():
        rig.cache.blocks[key] = data.ljust(4096, b"\1")
    rig.folder.calls.clear()
    rig.again()
    rig.require_equal(len(NUMBERS) - 5, len(NUMBERS))
    assert rig.folder.calls == []
    assert rig.counts.cache_damaged == 0


def flipped(wanted: Callable[[FileRange], bool], times: int) -> Callable[[FileRange, bytes], bytes]:
    left = [times]

    def change(one: FileRange, data: bytes) -> bytes:
        if wanted(one) and left[0]:
            left[0] -= 1
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    return change


@pytest.mark.parametrize("what", ["unit/a.tokens", "unit/a.tokens.sums"])
def test_a_damaged_part_is_fetched_once_more_and_then_named(rig: Rig, what: str) -> None:
    start = {"unit/a.tokens": 8192, "unit/a.tokens.sums": 0}[what]
    rig.folder.change = flipped(lambda one: one.name == what, 1)
    rig.require_equal(4096, 5000)
    assert rig.counts.damaged_blocks == 1
    rig.cache.blocks.clear()
    rig.again()
    rig.folder.change = flipped(lambda one: one.name == what, 10)
    with pytest.raises(UserError, match=rf"(?s)gs://bucket/tokens/{what} .*bytes {start} to {start + 4095}") as caught:
        rig.array.read(4096, 5000)
    assert caught.value.code == "E-DATA-180"
    assert not isinstance(caught.value, StorageError)
    rig.folder.change = lambda one, data: data
    rig.require_equal(4096, 5000)


def test_damage_in_the_bucket_is_never_returned(tmp_path: Path) -> None:
    rig = Rig(tmp_path, NUMBERS)
    with open(tmp_path / "unit/a.tokens", "r+b") as file:
        file.seek(4096 * 100 + 17)
        file.write(b"\xff\xff\xff")
    with pytest.raises(UserError, match=r"block 100 \(bytes 409600 to 413695\)"):
        rig.array.read(0, len(NUMBERS))
    rig.require_equal(0, 2048 * 100)


@pytest.mark.parametrize("how", ["short", "long", "fails"])
def test_wrong_answers_are_repeated_and_counted(rig: Rig, pauses: list[float], how: str) -> None:
    left = [3]

    def change(one: FileRange, data: bytes) -> bytes:
        if left[0]:
            left[0] -= 1
            if how == "fails":
                raise StorageError("E-DATA-170", "503", why="", fix="")
            return data[:-1] if how == "short" else data + b"x"
        return data

    rig.folder.change = change
    starts = list(range(0, 3_000_000, 300_000))
    for start, found in zip(starts, rig.ranges(starts, [start + 9 for start in starts]), strict=True):
        assert np.array_equal(found, NUMBERS[start : start + 9])
    assert rig.counts.failed_requests >= (2 if how == "fails" else 3)
    assert pauses


def test_patience_ends(rig: Rig, pauses: list[float]) -> None:
    rig.folder.change = lambda one, data: data[:-1] or data  # the last byte alone can be read
    with pytest.raises(StorageError, match=r"unit/a\.tokens") as caught:
        rig.array.read(0, 100)
    assert caught.value.code == "E-DATA-182"
    assert READS.total_seconds - READS.most_seconds <= sum(pauses) <= READS.total_seconds


@pytest.mark.parametrize("what", ["cut", "removed"])
def test_a_missing_or_cut_object_is_named_at_once(rig: Rig, pauses: list[float], what: str) -> None:
    file = rig.folder.path / "unit/a.tokens"
    file.unlink()
    if what == "cut":
        file.write_bytes(NUMBERS.tobytes()[:1000])
    with pytest.raises(UserError, match=r"gs://bucket/tokens/unit/a\.tokens") as caught:
        rig.array.read(1_000_000, 1_000_100)
    assert (caught.value.code, pauses) == ("E-DATA-181", [])


def test_two_threads_fetch_a_range_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, NUMBERS)
    asked, go = threading.Event(), threading.Event()

    def change(one: FileRange, data: bytes) -> bytes:
        asked.set()
        assert go.wait(20)
        return data

    rig.folder.change = change
    joined = threading.Event()

    class Watched(dict[Any, Any]):
        """Tells when the second thread joins the flight of the first one."""

        def setdefault(self, key: Any, value: Any) -> Any:
            if key in self:
                joined.set()
            return super().setdefault(key, value)

    rig.reader._flying = Watched()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rig.array.read, 0, 4096)
        assert asked.wait(20)
        second = pool.submit(rig.array.read, 1000, 4096)
        assert joined.wait(20)
        go.set()
        assert np.array_equal(first.result(20), NUMBERS[:4096])
        assert np.array_equal(second.result(20), NUMBERS[1000:4096])
    assert len(rig.folder.calls) == 1
    assert rig.reader._flying == {}


def test_a_thread_that_waits_for_a_failing_one_fetches_itself(tmp_path: Path) -> None:
    rig = Rig(tmp_path, NUMBERS)
    chance = np.random.default_rng(3)
    fails = [True]

    def change(one: FileRange, data: bytes) -> bytes:
        if fails[0]:
            raise UserError("E-DATA-181", "x", why="", fix="")
        return data

    rig.folder.change = change
    with pytest.raises(UserError):
        rig.array.read(0, 10)
    fails[0] = False
    assert rig.reader._flying == {}

    def some(seed: int) -> None:
        for start in np.random.default_rng(seed % 3).integers(0, 100_000, 30).tolist():
            rig.require_equal(start, start + 5000)

    rig.folder.change = lambda one, data: data[:-1] if chance.random() < 0.02 else data
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(some, range(12))) == [None] * 12
    assert rig.reader._flying == {}


def test_an_extent_is_fetched_once_into_the_cache(rig: Rig) -> None:
    whole = (500_000, 1_000_001)
    for start in (600_000, 500_000, 998_000):
        (found,) = read_parts([ArrayPart(rig.array, start, start + 2049, whole)])
        assert np.array_equal(found, NUMBERS[start : start + 2049])
    assert len(rig.folder.calls) == 1
    (span,) = [one for one in rig.folder.calls[0] if one.name == "unit/a.tokens"]
    assert span.start <= 1_000_000 < 2_000_002 <= span.stop


def test_without_a_cache_extents_stay_in_memory_as_far_as_they_fit(tmp_path: Path) -> None:
    rig = Rig(tmp_path, NUMBERS, is_kept=True)
    rig.reader.memory.__dict__["blocks"] = Recent(1 << 20)  # two extents
    for turn, extent in enumerate((0, 1, 0, 1, 2, 3, 0)):
        start = extent * 200_000 + 20_000 * turn  # another place each time
        (found,) = read_parts(
            [ArrayPart(rig.array, start, start + 2049, (extent * 200_000, (extent + 1) * 200_000 + 1))]
        )
        assert np.array_equal(found, NUMBERS[start : start + 2049])
    assert len(rig.folder.calls) == 5
    assert rig.reader.memory.blocks.used_bytes <= 1 << 20


def test_a_large_read_is_fetched_in_groups_and_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient_reads, "GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(patient_reads, "SPAN_BYTES", 1 << 18)
    rig = Rig(tmp_path, NUMBERS)
    rig.require_equal(0, len(NUMBERS))
    assert len(rig.folder.calls) == 6
    assert rig.reader.memory.in_flight.peak_bytes < 1.1 * (1 << 20)


def test_the_limit_of_bytes_is_kept_and_large_work_passes_alone() -> None:
    limit, busy, most = ByteLimit(100), [0], [0]
    lock = threading.Lock()

    def work(size: int) -> None:
        with limit.admitted(size):
            with lock:
                busy[0] += size
                most[0] = max(most[0], busy[0] if busy[0] != 500 else 0)
            with lock:
                busy[0] -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [30, 60, 500, 10, 90] * 20))
    assert most[0] <= 100
    assert limit.peak_bytes == 500


def test_near_ranges_are_merged_up_to_a_limit() -> None:
    def span(start: int, stop: int, name: str = "a") -> FileRange:
        return FileRange(name, start, stop)

    near = 100 + patient_reads.GAP_BYTES
    assert merged([span(0, 100), span(near, near + 1)]) == [span(0, near + 1)]
    assert merged([span(0, 100), span(near + 1, near + 2)]) == [span(0, 100), span(near + 1, near + 2)]
    assert merged([span(5, 9, "b"), span(0, 4), span(0, 4)]) == [span(0, 4), span(5, 9, "b")]
    limit = patient_reads.SPAN_BYTES
    assert merged([span(0, limit), span(limit, limit + 1)]) == [span(0, limit), span(limit, limit + 1)]


def test_a_range_inside_of_another_one_is_covered() -> None:
    ranges = [FileRange("a", 0, 1000), FileRange("a", 10, 50), FileRange("b", 10, 50)]
    assert merged(ranges) == [FileRange("a", 0, 1000), FileRange("b", 10, 50)]


FEW_NUMBERS = np.random.default_rng(0).integers(0, 60_000, 400_000).astype("<u2")


class Reader:
    """A new process: its memory is empty, and its cache file exists."""

    def __init__(self, folder: Path, root: str) -> None:
        self.counts = ReadCounts()
        self.told: list[str] = []
        cache = BlockCache(folder / "cache", 8 << 20, self.counts, RecordingReporter(self.told))
        self.bucket = StandIn(folder / "bucket")
        reader = BlockReader(self.bucket, cache, self.counts, ReadMemory())
        self.array = BucketArray(reader, "unit/a.tokens", FEW_NUMBERS.dtype, len(FEW_NUMBERS), root)

    def numbers(self) -> np.ndarray:
        return np.asarray(self.array.read(0, len(FEW_NUMBERS)))


def swap_lines(file: Path) -> None:
    """Exchange the contents of neighbouring lines. Entries and tags stay, so every line looks valid."""
    geometry = stored_geometry(file)
    assert geometry is not None
    data = bytearray(file.read_bytes())
    lines = range(geometry.lines_at, len(data) - 2 * LINE_BYTES + 1, 2 * LINE_BYTES)
    for at in lines:
        first, second = data[at : at + LINE_BYTES], data[at + LINE_BYTES : at + 2 * LINE_BYTES]
        data[at : at + 2 * LINE_BYTES] = second + first
    with file.open("r+b") as opened:
        opened.write(data)


def replace_lines(file: Path) -> None:
    """Write the same chosen bytes into every line, as one who wants to train on other data."""
    geometry = stored_geometry(file)
    assert geometry is not None
    with file.open("r+b") as opened:
        opened.seek(geometry.lines_at)
        opened.write(b"\x07\x00" * ((os.path.getsize(file) - geometry.lines_at) // 2))


@pytest.mark.parametrize("poison", [swap_lines, replace_lines])
def test_a_poisoned_cache_changes_no_number(tmp_path: Path, poison: Callable[[Path], None]) -> None:
    root = write_array(tmp_path / "bucket/unit/a.tokens", FEW_NUMBERS)
    assert np.array_equal(Reader(tmp_path, root).numbers(), FEW_NUMBERS)
    unharmed = Reader(tmp_path, root)
    assert np.array_equal(unharmed.numbers(), FEW_NUMBERS)
    assert unharmed.bucket.calls == [], "everything is cached"
    poison(tmp_path / "cache")
    poisoned = Reader(tmp_path, root)
    assert np.array_equal(poisoned.numbers(), FEW_NUMBERS)
    assert poisoned.counts.cache_damaged > 100
    repaired = Reader(tmp_path, root)
    assert np.array_equal(repaired.numbers(), FEW_NUMBERS)
    assert (repaired.counts.cache_damaged, repaired.bucket.calls) == (0, [])
