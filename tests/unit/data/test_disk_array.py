from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from forerun.data.blocks import SUFFIX, BlockSums
from forerun.data.disk_array import DiskArray
from forerun.errors import UserError


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
    with pytest.raises(UserError, match=r"a\.bin.*E-DATA-001"):
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
