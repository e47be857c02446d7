"""The predicted requests of a step against those that the reader makes, in both orders and on one and two hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_stand_in import MemoryCache, StandIn, write_array

from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.mixture import Mixture
from forerun.data.order.permutation import BlockOrder
from forerun.data.reads import block_reader, patient_reads
from forerun.data.reads.block_reader import BlockReader, ReadMemory
from forerun.data.reads.patient_reads import ReadCounts
from forerun.data.tokens import stored_documents
from forerun.data.tokens.stored_documents import StoredDocuments
from forerun.data.tokens.unit_table import UnitTable
from forerun.hardware import object_storage
from forerun.hardware.object_storage import BlockSizes, ReadLoad, step_reads

SEQUENCE, ROWS, UNITS = 2048, 1024, 2
SIZES = BlockSizes(4, 4)  # 64 blocks per lane, as for large data
START = 3 + 3  # requests of a host for the checksums and borders of each unit


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, UnitTable]:
    """Two units, of which the second one begins inside a row."""
    path = tmp_path_factory.mktemp("store")
    tokens = np.arange(SEQUENCE * ROWS, dtype=np.int64).astype("<u2")
    units = []
    for unit, part in enumerate(np.split(tokens, [999_999])):
        offsets = np.append(np.arange(0, len(part), 5000), len(part)).astype("<i8")
        home = path / f"unit-{unit:05d}-of-{UNITS:05d}"
        roots = {
            "train.tokens": write_array(home / "train.tokens", part),
            "train.offsets": write_array(home / "train.offsets", offsets),
        }
        side = {"documents": len(offsets) - 1, "tokens": len(part), "learned": len(part), "largest": 9}
        side |= {"longest": 5000, "single": 0, "targets": len(part)}
        sides = {"train": side | {"digest": "0" * 16}, "validation": dict.fromkeys(side, 0) | {"digest": "0" * 16}}
        about = {"unit": unit, "of": UNITS, "rows": 1, "bad": 0, "bad_files": []}
        units.append(about | {"sides": sides, "blocks": roots})
    return path, UnitTable(units)


def measured(store: tuple[Path, UnitTable], shuffle: str, batch: int, hosts: int) -> tuple[int, int, int]:
    """Return the requests and the bytes of all hosts in an epoch, and the steps. Also compare the tokens."""
    counts = ReadCounts()
    for host in range(hosts):
        folder = StandIn(store[0])
        # Rows have no cache: one that holds everything would have many of these short rows from their neighbours.
        reader = BlockReader(folder, MemoryCache() if shuffle == "blocks" else None, counts, ReadMemory())
        documents = StoredDocuments(folder, "train", 60_000, store[1], reader)
        if shuffle == "blocks":
            documents = replace(documents, extent_tokens=SIZES.block_rows * SEQUENCE)
        mixture = Mixture([Concatenated(documents, SEQUENCE)])
        if shuffle == "blocks":
            mixture.block_orders = [BlockOrder((ROWS,), SIZES)]
        held = np.arange(batch).reshape(hosts, -1)[host]
        batches = Batches(mixture, seed=1, batch=batch, held=held)
        for step in range(ROWS // batch):
            found = batches.batch_at(step).tokens[0, :, 0]
            assert found.tolist() == (batches.ids_at(step)[held] * SEQUENCE % 65536).tolist()
    return counts.requests, counts.read_bytes, ROWS // batch


@pytest.mark.parametrize(
    ("shuffle", "batch", "hosts"), [("rows", 16, 1), ("rows", 16, 2), ("blocks", 4, 2), ("blocks", 16, 2)]
)
def test_predicted_requests_are_those_of_the_reader(
    store: Any, monkeypatch: pytest.MonkeyPatch, shuffle: Any, batch: int, hosts: int
) -> None:
    monkeypatch.setattr(BlockSizes, "of", lambda rows, row_bytes: SIZES)
    monkeypatch.setattr(patient_reads, "GAP_BYTES", 4096)  # in a small store, most rows are near to each other
    monkeypatch.setattr(object_storage, "MERGED_GAP_BYTES", 4096)
    load = ReadLoad("gs", batch, SEQUENCE, 2, rows=ROWS, documents=420, hosts=hosts, cache_bytes=1 << 30)
    wanted = step_reads(load, shuffle)
    requests, read_bytes, steps = measured(store, shuffle, batch, hosts)
    # Blocks that a border of lanes cuts are read twice: at most two more per lane and host.
    cut = 1 + 2 * SIZES.lanes * SIZES.block_rows / ROWS if shuffle == "blocks" else 1.0
    assert wanted.requests * 0.97 <= (requests - START * hosts) / steps <= wanted.requests * 1.03 * cut
    assert wanted.read_bytes * 0.9 <= read_bytes / steps <= wanted.read_bytes * 1.1 * cut


def test_the_assumptions_are_those_of_the_reader() -> None:
    assert object_storage.SUMS_MEMORY_BYTES == block_reader.SUMS_BYTES
    assert object_storage.EXTENTS_MEMORY_BYTES == block_reader.BLOCKS_BYTES
    assert object_storage.MERGED_GAP_BYTES == patient_reads.GAP_BYTES
    assert object_storage.BORDERS_MEMORY_BYTES == stored_documents.ALL_OFFSETS_BYTES
