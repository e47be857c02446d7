"""One side of a store in a bucket: rows are those of the local store, and a batch needs few round trips."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))

from folder_stand_in import MemoryCache, StandIn

from forerun.data import checked_json
from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.whole_documents import WholeDocuments
from forerun.data.reads.block_reader import BlockReader, ReadMemory
from forerun.data.reads.patient_reads import ReadCounts
from forerun.data.tokens import stored_documents
from forerun.data.tokens.document import Encoded
from forerun.data.tokens.recipe import FORMAT
from forerun.data.tokens.store import INDEX, index_entry
from forerun.data.tokens.stored_documents import StoredDocuments
from forerun.data.tokens.unit import Unit, UnitWriter
from forerun.data.tokens.unit_table import UnitTable
from forerun.objectives.batch import NAMES
from forerun.storage.bucket import BucketFolder
from forerun.storage.folder import LocalFolder

UNITS, DOCUMENTS, VOCAB = 4, 12_000, 70_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 4 units, each with 12,000 documents: 94 KB of offsets, and masks in half of the units."""
    folder = tmp_path_factory.mktemp("store")
    chance = np.random.default_rng(0)
    entries = []
    for number in range(UNITS):
        writer = UnitWriter(folder, Unit(number, UNITS, (), 1), VOCAB)
        for _ in range(DOCUMENTS // 4000):
            lengths = chance.geometric(1 / 60, 4000)
            ids = np.split(chance.integers(0, VOCAB, int(lengths.sum()), dtype=np.int32), np.cumsum(lengths)[:-1])
            masks = [chance.random(len(one)) < 0.7 if number % 2 else None for one in ids]
            writer.add("train", [Encoded(one, mask) for one, mask in zip(ids, masks, strict=True)])
        entries.append(index_entry(writer.finish()))
    content = {"format": FORMAT, "recipe": {"vocab": VOCAB}, "source": "x", "units": entries}
    (folder / INDEX).write_bytes(checked_json.encode(content))
    return folder


def documents(store: Path, kind: str, cache: MemoryCache | None = None) -> StoredDocuments:
    units = UnitTable(checked_json.decode((store / INDEX).read_bytes())["units"])
    if kind == "local":
        return StoredDocuments(LocalFolder(store), "train", VOCAB, units)
    folder = StandIn(store)
    return StoredDocuments(folder, "train", VOCAB, units, BlockReader(folder, cache, ReadCounts(), ReadMemory()))


@pytest.fixture(params=["whole offsets", "blocks of offsets"])
def bucket(request: pytest.FixtureRequest, store: Path, monkeypatch: pytest.MonkeyPatch) -> StoredDocuments:
    if request.param == "blocks of offsets":
        monkeypatch.setattr(stored_documents, "ALL_OFFSETS_BYTES", 0)
    return documents(store, "bucket")


def require_equal_rows(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert np.array_equal(found[name], expected[name]), name
        assert found[name].dtype == expected[name].dtype


def test_documents_in_a_bucket_are_those_of_the_local_store(store: Path, bucket: StoredDocuments) -> None:
    local, chance = documents(store, "local"), np.random.default_rng(1)
    assert (len(bucket), bucket.tokens, bucket.digest) == (len(local), local.tokens, local.digest)
    ends = bucket._first_token
    starts = np.concatenate([chance.integers(0, local.tokens - 300, 40), ends[:-1], ends[1:-1] - 7, [5]])
    stops = np.concatenate([starts[:-1] + chance.integers(0, 300, len(starts) - 1), [local.tokens // 2]])
    for (ids, mask), (start, stop) in zip(
        bucket.read_many(starts.tolist(), stops.tolist()),
        zip(starts.tolist(), stops.tolist(), strict=True),
        strict=True,
    ):
        expected, expected_mask = local.read(start, stop)
        assert np.array_equal(ids, expected)
        assert (mask is None) == (expected_mask is None)
        assert mask is None or np.array_equal(mask, expected_mask)
        assert ids.dtype == expected.dtype
    some = chance.integers(0, len(local) + 1, (3, 50))
    assert np.array_equal(bucket.begins(some), local.begins(some))
    addresses = chance.integers(0, local.tokens, (2, 70))
    assert np.array_equal(bucket.holding(addresses), local.holding(addresses))
    with pytest.raises(IndexError):
        bucket.read_many([0], [local.tokens + 1])


@pytest.mark.parametrize("packing", ["concatenated", "whole"])
def test_a_batch_needs_at_most_three_round_trips(
    store: Path, bucket: StoredDocuments, packing: str, tmp_path: Path
) -> None:
    def rows(from_: StoredDocuments) -> Concatenated | WholeDocuments:
        return (
            Concatenated(from_, 256) if packing == "concatenated" else WholeDocuments(from_, 256, plan_folder=tmp_path)
        )

    local = Batches(rows(documents(store, "local")), seed=3, batch=64)
    there = Batches(rows(bucket), seed=3, batch=64)
    folder = bucket.folder
    assert isinstance(folder, StandIn)
    for step in range(3):
        folder.calls.clear()
        found, expected = there.batch_at(step), local.batch_at(step)
        require_equal_rows(*({name: getattr(one, name) for name in NAMES} for one in (found, expected)))
        assert len(folder.calls) <= 3
        assert there.examples_at(step) == local.examples_at(step)
        assert len(folder.calls) <= 3, "the borders for the ledger are in memory"
    folder.calls.clear()
    there.batch_at(0)
    assert not [one for call in folder.calls for one in call if one.name.endswith(".sums")]


@pytest.mark.parametrize("has_cache", [True, False])
def test_an_extent_is_one_request_for_all_its_rows(store: Path, has_cache: bool) -> None:
    size = 1 << 16
    bucket = replace(documents(store, "bucket", MemoryCache() if has_cache else None), extent_tokens=size)
    local, folder = Concatenated(documents(store, "local"), 512), bucket.folder
    assert isinstance(folder, StandIn)
    rows = Concatenated(bucket, 512)
    rows.take([5 * 128 + 3])
    folder.calls.clear()
    for row in range(5 * 128, 6 * 128):  # all rows of the extent
        require_equal_rows(rows.take([row]), local.take([row]))
    assert [one for call in folder.calls for one in call if one.name.endswith((".tokens", ".learned"))] == []
    everywhere = np.random.default_rng(0).permutation(len(rows))[:200]
    require_equal_rows(rows.take(everywhere), local.take(everywhere))


def test_the_report_needs_no_reads(store: Path) -> None:
    local_documents, bucket = documents(store, "local"), documents(store, "bucket")
    local = Concatenated(local_documents, 256)
    rows = Concatenated(bucket, 256)
    folder = bucket.folder
    assert isinstance(folder, StandIn)
    lengths = np.diff(local_documents.begins(np.arange(len(local_documents) + 1)))
    assert rows.report == local.report
    assert (rows.report.longest, rows.report.nothing_to_learn) == (lengths.max() - 1, (lengths < 2).sum())
    assert folder.calls == []
    assert rows.count_too_long() == local.count_too_long() == (lengths - 1 > 256).sum() > 0


def test_it_travels_without_open_files_and_threads(store: Path) -> None:
    bucket = replace(documents(store, "bucket"), folder=BucketFolder("gs://b/k"))
    object.__setattr__(bucket, "reader", BlockReader(bucket.folder, MemoryCache(), ReadCounts()))
    again = pickle.loads(pickle.dumps(bucket))
    assert (again.folder, again.tokens, again.reader.cache) == (bucket.folder, bucket.tokens, None)
