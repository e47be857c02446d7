"""One small job whose tokens are in a folder, in an emulator of GCS or in one of S3, read through a faulty proxy.

with DataBuckets(folder) as buckets:
    expected = buckets.reference(hosts=4)
    found = buckets.trained(Case("s3", hosts=4, cache=True, faults=True))
    assert found.differs(expected) == []

Every case is `forerun train` in processes of its own: one process with four devices, or four hosts with one device
each.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "data" / "source"))

import gcs_server
import store_server
from faulty_proxy import FaultyProxy, Injected
from runs import TEXT, Bench, Outcome, Run
from runs_hosts import HostsRun

HOSTS, STEPS, FILES = 4, 40, 3
FAULT_EVERY, SLOW_SECONDS = 50, 0.3
SEQUENCE, BATCH = 64, 32  # of the job
DAMAGED = "E-DATA-180"
# The rows of a step lie in three units of the store, and its token files are too large to stay in memory.
JOB = """\
model: {{layers: 1, embed: 16, heads: 2}}
data: {{path: text, ledger: true, store: store}}
sequence: 64
batch: 32
steps: {steps}
device: cpu
optimizer: {{lr: 1e-2}}
precision: {{compute: float32}}
checkpoint: {{every: {every}}}
remat: none
sample: {{tokens: 0}}
"""
PLACES = ("local", "gcs", "s3")
# Programs that run for seconds must not compile for minutes.
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}


@dataclass(frozen=True)
class Case:
    """Where the tokens are, how many hosts read them, and what happens meanwhile."""

    place: str
    hosts: int = 1
    cache: bool = False
    faults: bool = False
    deleted: bool = False  # the cache is deleted during the run
    steps: int = STEPS

    @property
    def name(self) -> str:
        marks = [mark for mark in ("cache", "faults", "deleted") if getattr(self, mark)]
        return "-".join([self.place, str(self.hosts), *marks])


@dataclass(frozen=True)
class Trained:
    """A run and what the proxy did to it. `counts` are the run's own counts of its reads, summed over the hosts."""

    outcome: Outcome
    counts: dict[str, int]
    reads: int = 0
    faults: list[Injected] = field(default_factory=list)
    said: str = ""

    def injected(self, *kinds: str) -> int:
        """Return the number of injected faults of these kinds; of all kinds if none is named."""
        return sum(not kinds or one.kind in kinds for one in self.faults)

    def injected_by_kind(self) -> dict[str, int]:
        """Return the number of injected faults of each kind."""
        return dict(sorted(Counter(one.kind for one in self.faults).items()))


def unreported(case: Case, found: Trained) -> list[str]:
    """Return which of the injected faults the run does not report."""
    counts = dict(found.counts)
    # The driver repeats failed requests by itself. They are counted as failed only.
    counts["data_requests"] = counts.get("data_requests", 0) + counts.get("data_failed_requests", 0)
    wanted = {
        "data_requests": found.reads,
        "data_damaged_blocks": found.injected("flip"),
        "data_failed_requests": found.injected("refuse", "reset", "short", "cut"),
        "data_cache_errors": int(case.deleted),
    }
    return [f"{key}: {counts.get(key)} of {value}" for key, value in wanted.items() if counts.get(key, -1) < value]


def damage_of(buckets: DataBuckets, case: Case) -> dict[str, Any]:
    """Change one byte of a token file in the bucket that the first step reads, train, and return what the run says."""
    emulator = buckets.emulator(case.place)
    unit, place = first_read(buckets.store)
    key = f"{buckets.store.name}/{unit}/train.tokens"
    content = bytearray((buckets.store.parent / key).read_bytes())
    content[place] ^= 1
    emulator.put(f"tokens/{key}", bytes(content))
    try:
        with FaultyProxy(emulator.address) as proxy, Run(buckets.bench, f"damaged-{case.name}") as run:
            words = [f"data.store={emulator.bucket}/tokens", "data.cache_gib=0"]
            run.start(*words, devices=HOSTS, environment={**proxy.environment(emulator.environment), **QUICK})
            code = run.process.wait(600)
            said = run.said()
    finally:
        emulator.put(f"tokens/{key}", (buckets.store.parent / key).read_bytes())
    named = f"{emulator.bucket}/tokens/{key} is damaged" in said
    return {"ok": code == 2 and named and DAMAGED in said, "code": code, "named": named, "said": said[-600:]}


def first_read(store: Path) -> tuple[str, int]:
    """Return the unit of the first row of the first step, and the first byte of the row in its token file."""
    from forerun.data.order.batches import Batches
    from forerun.data.order.concatenated import Concatenated
    from forerun.data.tokens.store import open_store
    from forerun.storage.open_folder import folder_at

    documents = open_store(folder_at(store)).train
    row = int(Batches(Concatenated(documents, SEQUENCE), seed=0, batch=BATCH).ids_at(0)[0])
    token = row * SEQUENCE
    for number in range(FILES):
        unit = f"unit-{number:05d}-of-{FILES:05d}"
        tokens = (store / unit / "train.tokens").stat().st_size // 2  # ids of bytes have two bytes each
        if token < tokens:
            return unit, 2 * token
        token -= tokens
    raise AssertionError(f"row {row} is in no unit")


class DataBuckets:
    """The job, its tokens in a local store, and emulators that are started when they are first used."""

    def __init__(self, folder: Path, *, steps: int = STEPS, every: int = FAULT_EVERY, seed: int = 0) -> None:
        self.every, self.seed = every, seed
        self.bench = Bench(folder, steps=steps, every=steps, job=JOB)
        write_texts(folder / "text")
        self._stack = ExitStack()
        self._emulators: dict[str, Emulator] = {}
        self._references: dict[int, Outcome] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def store(self) -> Path:
        """The folder of the only local store. Its name is the key of the tokens."""
        [found] = (self.bench.folder / "store").iterdir()
        return found

    def reference(self, hosts: int) -> Outcome:
        """Return the outcome of the run that reads a local store."""
        if hosts not in self._references:
            self._references[hosts] = self.trained(Case("local", hosts)).outcome
        return self._references[hosts]

    def emulator(self, place: str) -> Emulator:
        """Return the emulator, with a copy of the local store as its content."""
        if place not in self._emulators:
            start = {"gcs": gcs, "s3": s3}[place]
            found = self._emulators[place] = self._stack.enter_context(start(self.bench.folder / "buckets"))
            for file in sorted(self.store.rglob("*")):
                if file.is_file():
                    found.put(f"tokens/{file.relative_to(self.store.parent)}", file.read_bytes())
        return self._emulators[place]

    def trained(self, case: Case) -> Trained:
        """Run the job and return what it computed and counted."""
        if case.place == "local":
            return self._run(case, [], {})
        emulator = self.emulator(case.place)
        every = self.every if case.faults else 0
        with FaultyProxy(emulator.address, every=every, seed=self.seed, slow_seconds=SLOW_SECONDS) as proxy:
            words = [f"data.store={emulator.bucket}/tokens"]
            words += [] if case.cache else ["data.cache_gib=0"]
            found = self._run(case, words, proxy.environment(emulator.environment))
            return Trained(found.outcome, found.counts, proxy.reads, proxy.faults, found.said)

    def _run(self, case: Case, words: list[str], environment: dict[str, str]) -> Trained:
        home = self.bench.folder / "caches" / case.name
        environment = {**environment, **QUICK, "XDG_CACHE_HOME": str(home)}
        with ExitStack() as stack:
            if case.deleted:  # the run must not be over before its cache is deleted
                stack.enter_context(self.bench.held_back(self.bench.steps // 2, self.bench.steps, step_seconds=0.2))
            if case.hosts == 1:
                run = stack.enter_context(Run(self.bench, case.name))
                run.start(*words, devices=HOSTS, environment=environment)
                if case.deleted:
                    run.wait_for(lambda: run.last_step() >= self.bench.steps // 2 - 1)
                    delete_cache(home)
                    self.bench.release()
                run.finish()
                return Trained(run.outcome(), counts_of(run.folder), said=run.said())
            job = stack.enter_context(HostsRun(self.bench, case.name, case.hosts, *words, environment=environment))
            job.start_all()
            if case.deleted:
                job.until_step(self.bench.steps // 2 - 1)
                delete_cache(home)
                self.bench.release()
            assert job.wait() == [0] * case.hosts, job.said()
            return Trained(job.run.outcome(), counts_of(job.run.folder), said=job.said())


@dataclass(frozen=True)
class Emulator:
    """An emulator of a service of buckets. `bucket` is the address of its bucket, as users write it."""

    address: str
    bucket: str
    environment: dict[str, str]
    put: Callable[[str, bytes], None]


@contextmanager
def gcs(folder: Path) -> Iterator[Emulator]:
    """Start the emulator of GCS, whose objects are files of `folder`."""
    (folder / "gcs").mkdir(parents=True)
    with gcs_server.bucket(folder / "gcs") as environment:
        address, name = environment["STORAGE_EMULATOR_HOST"], gcs_server.BUCKET

        def put(key: str, body: bytes) -> None:
            send(f"{address}/upload/storage/v1/b/{name}/o?uploadType=media&name={quote(key, safe='')}", "POST", body)

        yield Emulator(address, f"gs://{name}", environment, put)


@contextmanager
def s3(folder: Path) -> Iterator[Emulator]:
    """Start the emulator of S3, whose objects are in its memory."""
    with store_server.s3_emulator() as store:
        address, name = store.environment["AWS_ENDPOINT_URL_S3"], store_server.BUCKET
        yield Emulator(address, f"s3://{name}", store.environment, store.put)


def send(address: str, method: str, body: bytes) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/octet-stream"}
    with direct.open(urllib.request.Request(address, body, headers, method=method), timeout=240) as answer:
        assert answer.status == 200


def write_texts(folder: Path) -> None:
    """Replace the text of the job by files that become one unit each, with the paragraphs of the book in any order."""
    paragraphs = [json.dumps({"text": text}) + "\n" for text in TEXT.read_text().split("\n\n") if text]
    shutil.rmtree(folder)
    folder.mkdir()
    chance = random.Random(0)
    for number in range(FILES):
        rows: list[str] = []
        while sum(map(len, rows)) < 2_200_000:
            rows += chance.sample(paragraphs, len(paragraphs))
        (folder / f"{number}.jsonl").write_text("".join(rows))


def counts_of(run: Path) -> dict[str, int]:
    """Return the counts of reads that a run reports in its summary."""
    summary = json.loads((run / "summary.json").read_text())
    return {key: value for key, value in summary.items() if key.startswith("data_") and isinstance(value, int)}


def delete_cache(home: Path) -> list[str]:
    """Delete all files of the cache of blocks, and return their names."""
    found = [path for path in (home / "forerun").rglob("*") if path.is_file() and "block" in str(path)]
    for path in found:
        os.unlink(path)
    assert found, "there is no cache"
    return [path.name for path in found]
