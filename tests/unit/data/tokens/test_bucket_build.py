"""Stores in a bucket: the same files and bytes as in a folder, whoever builds them and whenever a writer is killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from emulated_buckets import EmulatedBuckets, emulated_buckets

from forerun.config.schema import Part
from forerun.data.source.sources import Source, open_source
from forerun.data.tokens import unit as units_module
from forerun.data.tokens.build import PATIENCE_SECONDS, Limits, build, is_complete, missing_after_waiting
from forerun.data.tokens.recipe import Recipe
from forerun.data.tokens.store import INDEX, check, open_store, read_index
from forerun.data.tokens.unit import SUMMARY, Unit, publish, units_of
from forerun.data.tokens.unit_table import UnitTable, decode_index
from forerun.data.tokens.worker import TokenizeTask, answers
from forerun.data.tokens.worker_pool import Event
from forerun.errors import UserError
from forerun.storage.folder import FileRange, Folder
from forerun.storage.open_folder import folder_at

RECIPE = Recipe("bytes", "bytes", 256, 257, validation=0.2)
PROTOCOLS = ("gs", "s3")


@dataclass(frozen=True)
class MemoryBucket:
    """A bucket in memory. `writes` counts down the writes until the writer is killed."""

    address: str = "gs://memory/tokens"
    content: dict[str, bytes] = field(default_factory=dict)
    writes: list[int] = field(default_factory=list)
    listings: list[str] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        return False

    @property
    def repeated_requests(self) -> int:
        return 0

    def inside(self, name: str) -> MemoryBucket:
        return MemoryBucket(f"{self.address}/{name}", self.content, self.writes, self.listings)

    def _key(self, name: str) -> str:
        return f"{self.address}/{name}"

    def names(self) -> set[str]:
        return {name.partition("/")[0] for name in self.files()}

    def files(self) -> set[str]:
        self.listings.append(self.address)
        return {name.removeprefix(f"{self.address}/") for name in self.content if name.startswith(f"{self.address}/")}

    def exists(self, name: str) -> bool:
        return self._key(name) in self.content

    def read(self, name: str) -> bytes:
        if not self.exists(name):
            raise FileNotFoundError(2, "missing", name)
        return self.content[self._key(name)]

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.content.get(self._key(name)) for name in names]

    def read_ranges(self, ranges: Sequence[FileRange]) -> list[bytes]:
        return [self.read(one.name)[one.start : one.stop] for one in ranges]

    def create(self, name: str, content: bytes) -> bool:
        if self.exists(name):
            return False
        self.replace(name, content)
        return True

    def replace(self, name: str, content: bytes) -> None:
        if self.writes:
            if not self.writes[0]:
                raise Killed
            self.writes[0] -= 1
        self.content[self._key(name)] = content

    def remove(self, name: str) -> None:
        for key in [key for key in self.content if f"{key}/".startswith(f"{self._key(name)}/")]:
            del self.content[key]

    def require_writable(self) -> None:
        pass


class Killed(BaseException):
    """What a killed process does: nothing more."""


class InProcess:
    """An engine in this process, for a store that only this process has."""

    store: Folder = MemoryBucket()
    built: tuple[str, ...] = ()

    def __init__(self, units: Sequence[Unit], task: dict[str, Any], workers: int | None) -> None:
        self._units = units
        source, recipe = Source.from_json(task["source"]), Recipe.from_json(task["recipe"])
        stops = {name: task[name] for name in ("rows_stop", "files_stop")}
        self._task = TokenizeTask(source, recipe, self.store.inside(task["store"].rpartition("/")[2]), **stops)

    def events(self) -> Iterator[Event]:
        for unit in self._units:
            for answer in answers(self._task, unit):
                ((kind, content),) = answer.items()
                yield Event(kind, unit, content)
            type(self).built += (unit.name,)

    def up_to(self, unit: Unit) -> None:
        pass

    def end(self) -> None:
        pass


def engine_for(store: Folder) -> type[InProcess]:
    return type("Engine", (InProcess,), {"store": store, "built": ()})


def written(folder: Folder) -> dict[str, bytes]:
    return {name: folder.read(name) for name in sorted(folder.files())}


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "MIB", 1024)  # units of 2 KiB
        yield


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    file = tmp_path_factory.mktemp("data") / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"line {n} " * (1 + n % 17)}) + "\n" for n in range(120)))
    return open_source(Part(path=str(file)))


@pytest.fixture(scope="module")
def local(source: Source, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the store in a folder, built by two processes."""
    store = build(source, RECIPE, tmp_path_factory.mktemp("local"), workers=2)
    return written(folder_at(store))


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedBuckets]:
    with emulated_buckets(tmp_path_factory.mktemp("buckets")) as found:
        yield found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bucket_has_the_bytes_of_a_folder(
    protocol: str, source: Source, local: dict[str, bytes], buckets: EmulatedBuckets, cache: Path
) -> None:
    """Two shards, each with two worker processes, then the complete store opens and is verified."""
    root = folder_at(f"{buckets.address(protocol)}/tokens")
    first = build(source, RECIPE, root, workers=1, shard=(1, 2))
    assert not is_complete(first)
    store = build(source, RECIPE, root, workers=1, shard=(0, 2))
    assert is_complete(store)
    assert written(store) == local
    assert not list(cache.rglob("*.part")), "temporary folders are removed"
    check(store)
    assert open_store(store).counts.documents == 120
    assert build(source, RECIPE, root) == store
    name = next(name for name in sorted(local) if name.endswith("train.tokens"))
    store.replace(name, local[name][:-1] + bytes([local[name][-1] ^ 1]))
    with pytest.raises(UserError) as caught:
        check(store)
    assert caught.value.code == "E-DATA-175"
    assert f"{store.address}/{name}" in caught.value.what
    store.remove(name)
    with pytest.raises(UserError) as caught:
        check(store)
    assert caught.value.code == "E-DATA-175"


def test_killed_after_each_write_and_built_again(source: Source, local: dict[str, bytes]) -> None:
    """A build with a limited number of writes is killed and started again, until it is finished."""
    for step in (1, 2, 3, 5, 8, 13):
        root, kills = MemoryBucket(), 0
        while True:
            killed = MemoryBucket(root.address, root.content, [step])
            try:
                store = build(source, RECIPE, killed, engine=engine_for(killed))
                break
            except Killed:
                kills += 1
                found = {name.split("/")[5] for name in root.content if name.endswith(SUMMARY)}
                for unit in found:  # a unit with a summary has all its files
                    wanted = {name for name in local if name.startswith(f"{unit}/")}
                    assert wanted <= killed.inside(next(iter(root.content)).split("/")[4]).files()
                assert kills < 10 * len(local)
        assert written(store) == local
        assert kills >= len(local) // step // 3


def test_damaged_file_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    for found in (b"other", b"the conten", b"the content and more", b""):
        store = MemoryBucket()
        part = tmp_path / "part"
        part.mkdir()
        (part / "train.tokens").write_bytes(b"the content")
        (part / SUMMARY).write_bytes(b"summary")
        store.inside("unit").create("train.tokens", found)
        publish(part, store, "unit", SUMMARY)
        assert written(store) == {"unit/train.tokens": b"the content", f"unit/{SUMMARY}": b"summary"}
        assert not part.exists()


def test_published_unit_is_kept(tmp_path: Path) -> None:
    store = MemoryBucket()
    store.inside("unit").create(SUMMARY, b"of another machine")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / SUMMARY).write_bytes(b"summary")
    (tmp_path / "part" / "train.tokens").write_bytes(b"tokens")
    publish(tmp_path / "part", store, "unit", SUMMARY)
    assert written(store) == {f"unit/{SUMMARY}": b"of another machine"}


def test_lost_answer_of_a_create_is_no_failure(tmp_path: Path) -> None:
    class LostAnswers(MemoryBucket):
        def inside(self, name: str) -> LostAnswers:
            return LostAnswers(f"{self.address}/{name}", self.content, self.writes, self.listings)

        def create(self, name: str, content: bytes) -> bool:
            super().create(name, content)
            return False

    (tmp_path / "part").mkdir()
    for name in ("train.tokens", SUMMARY):
        (tmp_path / "part" / name).write_bytes(name.encode() * 100)
    store = LostAnswers(writes=[2])  # a third write would be a needless replacement
    publish(tmp_path / "part", store, "unit", SUMMARY)
    assert written(store) == {f"unit/{name}": name.encode() * 100 for name in ("train.tokens", SUMMARY)}


def test_listings_do_not_grow_with_units(source: Source) -> None:
    root = MemoryBucket()
    build(source, RECIPE, root, engine=engine_for(root))
    assert len(units_of(source)) == 5
    assert len(root.listings) == 1, "one before the work; all units are then known"
    build(source, RECIPE, root, engine=engine_for(root))
    assert len(root.listings) == 1, "a finished store is not listed"


def test_limits_of_a_bucket_name_the_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 3}\n' * 2)
    source, root = open_source(Part(path=str(tmp_path / "a.jsonl"))), MemoryBucket()
    with pytest.raises(UserError) as caught:
        build(source, RECIPE, root, engine=engine_for(root), limits=Limits(rows=1))
    assert caught.value.code == "E-DATA-103"
    store = build(source, RECIPE, root, engine=engine_for(root), limits=Limits(rows=2))
    assert [bad.place.number for bad in open_store(store).skipped] == [2, 4]


def test_hosts_share_the_work(source: Source, local: dict[str, bytes]) -> None:
    """Three hosts build a third each at the same time, and all return a complete store."""
    root, engines = MemoryBucket(), []
    found: dict[int, dict[str, bytes]] = {}
    ready = threading.Barrier(3)

    def run(host: int) -> None:
        engine = engine_for(root)
        engines.append(engine)
        ready.wait()
        store = build(source, RECIPE, root, engine=engine, host=(host, 3))
        found[host] = written(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.data.tokens.build.POLL_SECONDS", 0.01)
        threads = [threading.Thread(target=run, args=(host,)) for host in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == dict.fromkeys(range(3), local)
    built = [name for engine in engines for name in engine.built]
    assert sorted(built) == sorted({name.partition("/")[0] for name in local} - {INDEX}), "each unit is built once"


def test_hosts_do_not_share_a_local_folder(source: Source, local: dict[str, bytes], tmp_path: Path) -> None:
    assert written(folder_at(build(source, RECIPE, tmp_path, workers=1, host=(1, 2)))) == local


class Waiting:
    """A store that other hosts add units to while this one sleeps."""

    def __init__(self, added: Sequence[int], index_after: float | None = None) -> None:
        self.units = [Unit(number, 4, (), 30_000_000) for number in range(4)]
        self.store, self.now = MemoryBucket(), 0.0
        self._added, self._index_after = list(added), index_after

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._added:
            self.store.create(f"{self.units[self._added.pop(0)].name}/{SUMMARY}", b"")

    def missing(self, *, first: bool) -> list[int] | None:
        found = missing_after_waiting(
            self.store,
            self.units,
            lambda: self._index_after is not None and self.now >= self._index_after,
            first=first,
            sleep=self.sleep,
            clock=lambda: self.now,
        )
        return None if found is None else [unit.number for unit in found]


def test_host_waits_for_units_and_builds_those_that_never_come() -> None:
    waiting = Waiting([0, 1])
    assert waiting.missing(first=True) == [2, 3]
    assert PATIENCE_SECONDS + 30 < waiting.now < PATIENCE_SECONDS + 60
    assert Waiting([3, 2, 1, 0], index_after=50).missing(first=False) is None
    assert Waiting([3, 2, 1, 0]).missing(first=True) == [], "the first host writes the index at once"
    late = Waiting([3, 2, 1, 0])
    assert late.missing(first=False) == [], "another one only if the first is gone"
    assert late.now > PATIENCE_SECONDS


def test_table_has_the_entries_of_the_index(local: dict[str, bytes]) -> None:
    raw = local[INDEX]
    wanted = json.loads(raw)
    index = decode_index(raw)
    assert {name: index[name] for name in ("format", "recipe", "source")} == {
        name: wanted[name] for name in ("format", "recipe", "source")
    }
    assert list(index["units"]) == wanted["units"]
    assert index["units"][-1] == wanted["units"][-1]
    assert index["units"][1:3] == wanted["units"][1:3]
    spaced = json.dumps(wanted).encode()
    for damaged in (raw[:-1], raw.replace(b'"rows":', b'"rows":1', 1), b"[]", b"", b'{"units":[}', spaced):
        with pytest.raises((ValueError, KeyError)):
            decode_index(damaged)


def test_table_of_units_with_different_files() -> None:
    side = {"documents": 1, "tokens": 2, "learned": 2, "largest": 5, "digest": "0123456789abcdef"}
    side |= {"longest": 2, "single": 0, "targets": 1}
    units: list[dict[str, Any]] = [
        {"unit": 0, "of": 3, "rows": 1, "bad": 0, "bad_files": [], "sides": {"train": side, "validation": side}},
        {"unit": 1, "of": 3, "rows": 1, "bad": 2, "bad_files": [], "sides": {"train": side, "validation": side}},
        {"unit": 2, "of": 3, "rows": 1, "bad": 0, "bad_files": ["x"], "sides": {"train": side, "validation": side}},
    ]
    units[0]["blocks"] = {}
    units[1]["blocks"] = {"train.tokens": "1" * 16}
    units[2]["blocks"] = {"train.learned": "2" * 16, "train.tokens": "3" * 16}
    table = UnitTable(units)
    assert list(table) == units
    assert table.faulty == [1, 2]
    assert table.counts("train", "tokens").tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="unit 0"):
        UnitTable([{"unit": 0}])


def test_engine_gets_the_address(source: Source) -> None:
    """Worker processes and nodes of a cluster open the bucket by its address."""
    seen: list[str] = []

    class Recording(InProcess):
        def __init__(self, units: Sequence[Unit], task: dict[str, Any], workers: int | None) -> None:
            seen.append(task["store"])
            super().__init__(units, task, workers)

    root = MemoryBucket()
    Recording.store = root
    store = build(source, RECIPE, root, engine=Recording)
    assert seen == [store.address]
    assert read_index(store)["units"][0]["unit"] == 0
