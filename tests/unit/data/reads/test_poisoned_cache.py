"""A cache file that another process fills with valid lines of the wrong content: readers return the bucket's bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from folder_stand_in import StandIn, write_array
from recording_reporter import RecordingReporter

from forerun.data.reads.block_cache import BlockCache
from forerun.data.reads.block_reader import BlockReader
from forerun.data.reads.cache_file import LINE_BYTES, stored_geometry
from forerun.data.reads.read_counts import ReadCounts
from forerun.data.reads.read_memory import ReadMemory

NUMBERS = np.random.default_rng(0).integers(0, 60_000, 400_000).astype("<u2")


class Reader:
    """A new process: its memory is empty, and its cache file exists."""

    def __init__(self, folder: Path, root: str) -> None:
        self.counts = ReadCounts()
        self.told: list[str] = []
        cache = BlockCache(folder / "cache", 8 << 20, self.counts, RecordingReporter(self.told))
        self.bucket = StandIn(folder / "bucket")
        reader = BlockReader(self.bucket, cache, self.counts, ReadMemory())
        self.array = reader.array("unit/a.tokens", NUMBERS.dtype, len(NUMBERS), root)

    def numbers(self) -> np.ndarray:
        return np.asarray(self.array.read(0, len(NUMBERS)))


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
    root = write_array(tmp_path / "bucket/unit/a.tokens", NUMBERS)
    assert np.array_equal(Reader(tmp_path, root).numbers(), NUMBERS)
    unharmed = Reader(tmp_path, root)
    assert np.array_equal(unharmed.numbers(), NUMBERS)
    assert unharmed.bucket.calls == [], "everything is cached"
    poison(tmp_path / "cache")
    poisoned = Reader(tmp_path, root)
    assert np.array_equal(poisoned.numbers(), NUMBERS)
    assert poisoned.counts.cache_damaged > 100
    repaired = Reader(tmp_path, root)
    assert np.array_equal(repaired.numbers(), NUMBERS)
    assert (repaired.counts.cache_damaged, repaired.bucket.calls) == (0, [])
