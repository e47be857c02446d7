"""A damaged manifest of a teacher's cache is refused: a changed temperature would select other numbers silently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.data.teacher_cache import MANIFEST, Identity, Layout, TeacherShards, read_manifest
from forerun.errors import StorageError, UserError

LAYOUT = Layout(rows=3, sequence=4, top_k=2, vocab=50, temperatures=(1.0, 2.0))


@pytest.fixture
def shards(tmp_path: Path) -> TeacherShards:
    made = TeacherShards(tmp_path, Identity("data", "tokenizer", "teacher", "fingerprint", "float32", LAYOUT))
    made.begin()
    row = LAYOUT.packed(np.ones((4, 2)), np.ones((4, 2)), np.zeros((4, 2)))
    for shard in range(LAYOUT.shards):
        made.write(shard, [row] * len(LAYOUT.rows_of(shard)))
    return made


def test_every_flipped_bit_of_the_manifest_is_found(shards: TeacherShards) -> None:
    assert read_manifest(shards.folder) == shards
    file = shards.folder / MANIFEST
    raw = file.read_bytes()
    for at in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[at // 8] ^= 1 << at % 8
        file.write_bytes(damaged)
        with pytest.raises(UserError):
            read_manifest(shards.folder)


def test_every_flipped_bit_of_a_row_is_found() -> None:
    row = LAYOUT.packed(np.ones((4, 2)), np.ones((4, 2)), np.zeros((4, 2)))
    assert LAYOUT.unpacked(row) is not None
    for at in range(8 * len(row)):
        damaged = bytearray(row)
        damaged[at // 8] ^= 1 << at % 8
        assert LAYOUT.unpacked(bytes(damaged)) is None


def test_a_disk_without_space_for_the_cache_is_trouble_with_the_disk(tmp_path: Path) -> None:
    huge = Layout(rows=1, sequence=1 << 50, top_k=64, vocab=50, temperatures=(1.0,))
    with pytest.raises(StorageError):
        TeacherShards(tmp_path, Identity("d", "t", "t", "f", "float32", huge)).require_disk_space()
