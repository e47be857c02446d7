"""Arrays in a bucket answer as arrays in memory do, with few round trips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_stand_in import StandIn, write_array

from forerun.data.reads.block_reader import BlockReader, ReadMemory
from forerun.data.reads.bucket_array import BucketArray, numbers_at, places_of
from forerun.data.reads.patient_reads import ReadCounts


def array_of(path: Path, numbers: np.ndarray, name: str = "a", **options: Any) -> tuple[BucketArray, StandIn]:
    root = write_array(path / name, numbers)
    folder = StandIn(path)
    reader = BlockReader(folder, None, ReadCounts(), ReadMemory())
    return BucketArray(reader, name, numbers.dtype, len(numbers), root, **options), folder


def offsets(kind: str, count: int = 400_000) -> np.ndarray:
    chance = np.random.default_rng(0)
    lengths = {
        "natural": chance.lognormal(6, 1.2, count),
        "short, then long": np.concatenate([np.full(count // 2, 3), np.full(count - count // 2, 30_000)]),
        "empty documents": chance.integers(0, 2, count) * 500,
        "one large": np.where(np.arange(count) == count // 3, 1 << 40, 1),
    }[kind]
    return np.concatenate([[0], np.cumsum(lengths.astype(np.int64))]).astype("<i8")


@pytest.mark.parametrize("kind", ["natural", "short, then long", "empty documents", "one large"])
def test_places_in_a_large_array(tmp_path: Path, kind: str) -> None:
    plain = offsets(kind)
    array, folder = array_of(tmp_path, plain, is_kept=True, ends=(0, int(plain[-1])))
    chance = np.random.default_rng(1)
    places = chance.integers(0, len(plain), 30)
    values = np.concatenate([plain[places], plain[places] - 1, chance.integers(0, plain[-1], 20), [0, plain[-1]]])
    values = np.clip(values, 0, None)
    assert np.array_equal(array.places_of(values), np.searchsorted(plain, values, side="right"))
    if kind == "natural":
        assert len(folder.calls) <= 2
        folder.calls.clear()
        array.at(np.searchsorted(plain, values[:30], side="right") - 1)
        assert folder.calls == [], "the blocks are in memory"


@pytest.mark.parametrize("ends", [None, (0, 60_000)])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8"])
def test_it_answers_as_the_array_does(tmp_path: Path, dtype: str, ends: tuple[int, int] | None) -> None:
    chance = np.random.default_rng(0)
    plain = np.sort(np.concatenate([[0, 60_000], chance.integers(0, 60_000, 50_000)])).astype(dtype)
    for options in ({}, {"is_kept": True}, {"is_whole": True}):
        array, _ = array_of(tmp_path, plain, ends=ends, **options)
        for many in (0, 1, 100, 5000):
            places = chance.integers(0, len(plain), many)
            assert np.array_equal(array.at(places), plain[places])
            values = chance.integers(0, 61_000, many)
            assert np.array_equal(array.places_of(values), np.searchsorted(plain, values, side="right"))
        assert array.at([0, len(plain) - 1]).tolist() == [plain[0], plain[-1]]
        assert array.places_of([-1, 0, 60_000, 60_001]).tolist() == [
            0,
            np.searchsorted(plain, 0, "right"),
            50_002,
            50_002,
        ]


def test_a_whole_array_is_fetched_once(tmp_path: Path) -> None:
    plain = offsets("natural", 100_000)
    array, folder = array_of(tmp_path, plain, is_whole=True)
    for _ in range(3):
        assert array.places_of([5_000_000]).tolist() == [np.searchsorted(plain, 5_000_000, side="right")]
        assert array.at([77_777]).tolist() == [plain[77_777]]
    assert len(folder.calls) == 1
    (span,) = [one for one in folder.calls[0] if one.name == "a"]
    assert (span.start, span.stop) == (0, plain.nbytes)


def test_several_arrays_are_asked_together(tmp_path: Path) -> None:
    plain = [offsets("natural", 200_000 + n) for n in range(5)]
    roots = [write_array(tmp_path / f"{n}", one) for n, one in enumerate(plain)]
    folder = StandIn(tmp_path)
    reader = BlockReader(folder, None, ReadCounts(), ReadMemory())
    arrays = [
        BucketArray(reader, f"{n}", "<i8", len(one), root, is_kept=True, ends=(0, int(one[-1])))
        for n, (one, root) in enumerate(zip(plain, roots, strict=True))
    ]
    wanted = [np.random.default_rng(n).integers(0, one[-1], 9) for n, one in enumerate(plain)]
    places = places_of(list(zip(arrays, wanted, strict=True)))
    assert len(folder.calls) <= 2
    for one, values, found in zip(plain, wanted, places, strict=True):
        assert np.array_equal(found, np.searchsorted(one, values, side="right"))
    numbers = numbers_at([(array, found - 1) for array, found in zip(arrays, places, strict=True)])
    for one, found, number in zip(plain, places, numbers, strict=True):
        assert np.array_equal(number, one[found - 1])
    assert len(folder.calls) <= 2


def test_the_last_number_is_found_without_a_read(tmp_path: Path) -> None:
    """Documents without tokens at the end of a unit repeat the last offset."""
    plain = np.concatenate([offsets("natural", 20_000), [1 << 40] * 3]).astype("<i8")
    array, folder = array_of(tmp_path, plain, ends=(0, 1 << 40))
    assert array.places_of([1 << 40]).tolist() == [len(plain)]
    assert folder.calls == []


def test_equal_numbers_have_a_place(tmp_path: Path) -> None:
    array, _ = array_of(tmp_path, np.full(20_000, 7, "<i8"))
    for value, expected in ((6, 0), (7, 20_000), (8, 20_000)):
        assert array.places_of([value]).tolist() == [expected]
