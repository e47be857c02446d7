"""Checksums of blocks: every flipped byte is found where it is used, and nowhere else."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from error_assertions import raises_error

from forerun.data import checked_json
from forerun.data.blocks import BLOCK_BYTES, CACHED_PAGES, PAGE_BLOCKS, SUFFIX, BlockSums
from forerun.data.disk_array import DiskArray
from forerun.errors import UserError

NUMBERS = BLOCK_BYTES // 8
SEEDS = 200


def written(file: Path, content: bytes, chunk_bytes: int = 1 << 20) -> str:
    """The root of a file written in chunks of this size."""
    sums = BlockSums()
    for start in range(0, len(content), chunk_bytes):
        sums.update(content[start : start + chunk_bytes])
    beside, root = sums.finish()
    file.write_bytes(content)
    file.with_name(file.name + SUFFIX).write_bytes(beside)
    return root


def flip(file: Path, at: int, bit: int = 0) -> None:
    with file.open("r+b") as content:
        content.seek(at)
        byte = content.read(1)[0]
        content.seek(at)
        content.write(bytes([byte ^ 1 << bit]))


@pytest.fixture
def sorted_file(tmp_path: Path) -> tuple[Path, str, np.ndarray]:
    """About 100 blocks, the last one not complete."""
    plain = np.sort(np.random.default_rng(0).integers(0, 1 << 40, 100 * NUMBERS - 3)).astype("<i8")
    file = tmp_path / "a.bin"
    return file, written(file, plain.tobytes()), plain


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, BLOCK_BYTES, 1 << 20])
def test_the_checksums_do_not_depend_on_how_a_file_is_written(tmp_path: Path, size: int, chunk_bytes: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    written(tmp_path / "a", content, chunk_bytes)
    blocks = [content[n : n + BLOCK_BYTES] for n in range(0, size, BLOCK_BYTES)]
    first = b"".join(xxhash.xxh3_64(block).digest() for block in blocks)
    second = xxhash.xxh3_64(first).digest() if first else b""
    assert (tmp_path / f"a{SUFFIX}").read_bytes() == first + second


@pytest.mark.parametrize("resident_bytes", [0, 1 << 30])
def test_it_answers_as_the_array_does(sorted_file: tuple[Path, str, np.ndarray], resident_bytes: int) -> None:
    file, root, plain = sorted_file
    disk = pickle.loads(pickle.dumps(DiskArray(file, plain.dtype, root, resident_bytes)))
    chance = np.random.default_rng(1)
    for many in (1, 2, 100, 20_000):
        places = chance.integers(0, len(plain), many)
        places[: many // 2] = np.arange(7, 7 + many // 2)
        assert np.array_equal(disk.at(places), plain[places])
        values = chance.integers(0, 1 << 40, many)
        assert np.array_equal(disk.places_of(values), np.searchsorted(plain, values, side="right"))
    for start, stop in np.sort(chance.integers(0, len(plain) + 1, (100, 2)), axis=1).tolist():
        assert np.array_equal(disk.read(start, stop), plain[start:stop])
    assert (len(disk.at([])), len(disk.places_of([])), len(disk.read(5, 5))) == (0, 0, 0)


def test_a_flipped_byte_is_found_by_every_read_of_its_block_and_by_no_other(
    sorted_file: tuple[Path, str, np.ndarray],
) -> None:
    file, root, plain = sorted_file
    chance = np.random.default_rng(2)
    for _ in range(SEEDS):
        at, bit = int(chance.integers(file.stat().st_size)), int(chance.integers(8))
        block, number = at // BLOCK_BYTES, at // 8
        flip(file, at, bit)
        disk = DiskArray(file, plain.dtype, root)
        after = min((block + 1) * NUMBERS, len(plain))
        before, behind = disk.read(0, block * NUMBERS), disk.read(after, len(plain))
        assert np.array_equal(before, plain[: block * NUMBERS])
        assert np.array_equal(behind, plain[after:])
        for read in (
            lambda n=number, d=disk: d.read(n, n + 1),
            lambda d=disk: d.read(0, len(plain)),
            lambda n=number, d=disk: d.at([0, n]),
            lambda n=number, d=disk: d.at(np.full(20_000, n)),
            lambda n=number, d=disk: d.places_of([plain[n]]),
        ):
            with pytest.raises(UserError) as caught:
                read()
            assert caught.value.what.startswith(str(file))
            assert str(block * BLOCK_BYTES) in caught.value.why
        flip(file, at, bit)
        assert np.array_equal(disk.read(0, len(plain)), plain)


def test_bytes_that_change_after_they_were_compared_are_compared_again(
    sorted_file: tuple[Path, str, np.ndarray],
) -> None:
    file, root, plain = sorted_file
    disk = DiskArray(file, plain.dtype, root)
    assert np.array_equal(disk.read(0, len(plain)), plain)
    flip(file, 5 * BLOCK_BYTES)
    with pytest.raises(UserError):
        disk.read(5 * NUMBERS, 5 * NUMBERS + 1)


def test_every_byte_of_the_checksums_is_compared(tmp_path: Path) -> None:
    """Two pages of checksums, so that a damaged page leaves the blocks of the other readable."""
    blocks = PAGE_BLOCKS + 2
    plain = np.random.default_rng(0).integers(0, 1 << 16, blocks * BLOCK_BYTES // 2).astype("<u2")
    file = tmp_path / "a.bin"
    root = written(file, plain.tobytes())
    sums = file.with_name(file.name + SUFFIX)
    assert sums.stat().st_size == 8 * (blocks + 2)
    per_block = BLOCK_BYTES // 2
    for at in [0, 7, 8 * PAGE_BLOCKS - 1, 8 * PAGE_BLOCKS, 8 * blocks - 1, *range(8 * blocks, 8 * (blocks + 2))]:
        flip(sums, at)
        disk = DiskArray(file, plain.dtype, root)
        page = at // (8 * PAGE_BLOCKS) if at < 8 * blocks else None
        for block, in_page in ((3, 0), (PAGE_BLOCKS + 1, 1)):
            start = block * per_block
            if page in (None, in_page):
                with raises_error("E-DATA-001"):
                    disk.read(start, start + 1)
            else:
                assert np.array_equal(disk.read(start, start + per_block), plain[start : start + per_block])
        flip(sums, at)
    for change in (lambda: sums.write_bytes(sums.read_bytes()[:-1]), sums.unlink):
        change()
        with raises_error("E-DATA-001"):
            DiskArray(file, plain.dtype, root).read(0, 1)


def test_a_file_of_many_pages(tmp_path: Path) -> None:
    """More pages of checksums than are cached, and a read across their border."""
    file, pages = tmp_path / "a.bin", CACHED_PAGES + 3
    file.touch()
    os.truncate(file, pages * PAGE_BLOCKS * BLOCK_BYTES - 5)
    sums = BlockSums()
    for _ in range(pages - 1):
        sums.update(bytes(PAGE_BLOCKS * BLOCK_BYTES))
    sums.update(bytes(PAGE_BLOCKS * BLOCK_BYTES - 5))
    beside, root = sums.finish()
    file.with_name(file.name + SUFFIX).write_bytes(beside)
    disk = DiskArray(file, np.dtype("u1"), root)
    for _ in range(2):
        for page in range(1, pages):
            border = page * PAGE_BLOCKS * BLOCK_BYTES
            assert not disk.read(border - BLOCK_BYTES - 1, border + 1).any()
    flip(file, border)
    with pytest.raises(UserError, match=str(border)):
        disk.read(border - BLOCK_BYTES - 1, border + 1)
    assert not disk.read(border - BLOCK_BYTES - 1, border).any()


@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_with_a_checksum_survives_no_flipped_bit(indent: int | None) -> None:
    value = {"format": 1, "name": "größe", "units": [{"blocks": {"a": "0"}}, {"tokens": 12}], "rate": 1.5}
    raw = checked_json.encode(value, indent)
    assert checked_json.decode(raw) == value
    for at in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[at // 8] ^= 1 << at % 8
        assert is_rejected(bytes(damaged))
    assert all(is_rejected(raw[:stop]) for stop in range(len(raw)))
    assert is_rejected(b'{"format": 1}'), "an object without a checksum"


def is_rejected(raw: bytes) -> bool:
    try:
        checked_json.decode(raw)
    except ValueError:
        return True
    return False


@pytest.fixture(params=["<u2", "<u4", "<i8"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DiskArray, np.ndarray]:
    plain = np.sort(np.random.default_rng(0).integers(0, 60_000, 50_000)).astype(request.param)
    sums = BlockSums()
    sums.update(plain.tobytes())
    content, root = sums.finish()
    (tmp_path / "a.bin").write_bytes(plain.tobytes())
    (tmp_path / f"a.bin{SUFFIX}").write_bytes(content)
    return DiskArray(tmp_path / "a.bin", plain.dtype, root), plain


def test_the_ends(both: tuple[DiskArray, np.ndarray]) -> None:
    disk, plain = both
    assert disk.at([0, len(plain) - 1]).tolist() == [plain[0], plain[-1]]
    assert disk.places_of(np.array([0, 65_000], plain.dtype)).tolist() == [
        np.searchsorted(plain, 0, side="right"),
        len(plain),
    ]


def test_a_file_that_was_cut_short_is_named(both: tuple[DiskArray, np.ndarray]) -> None:
    disk, plain = both
    disk.read(0, 1)
    os.truncate(disk.file, 100)
    with raises_error("E-DATA-001", "a.bin"):
        disk.read(len(plain) - 1, len(plain))


def test_it_travels_as_its_name_and_leaves_no_file_open(both: tuple[DiskArray, np.ndarray]) -> None:
    disk, plain = both
    disk.at(np.arange(1000))
    sent = pickle.dumps(disk)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert again.read(5, 9).tolist() == plain[5:9].tolist()
    before = times_open(disk.file)
    del again
    assert times_open(disk.file) == before - 1


def times_open(file: Path) -> int:
    """By this process; other threads may open and close what they like."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}") == os.path.realpath(file)
    return count
