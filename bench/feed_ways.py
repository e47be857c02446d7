"""Compare ways to deliver batches: threads, processes, and the feed of another source tree.

    python bench/feed_ways.py                         # ways of this version
    python bench/feed_ways.py --before OTHER/src      # and the feed of another version, with 0, 1 and 2 processes

Each way keeps its threads or processes between rounds. In each round, each way delivers the same number of batches, one
way after the other and in changing order. The consumer takes a batch as soon as it is placed on a CPU device. The first
batches of a round are not timed, because they were prefetched before the round. Writes results/feed_ways.json: the
median over rounds of milliseconds per batch (wall time, and CPU time with children), and of the ratio to the first way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from itertools import count
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import feed as feed_bench
import jax
import numpy as np

from forerun.config.schema import Data
from forerun.data.corpus import Dialect, open_corpus
from forerun.data.feed import Feed
from forerun.data.order.batches import Batches
from forerun.data.teacher_cache import CachedTeacherRows, Identity, Layout, TeacherShards
from forerun.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent
AHEAD, UNTIMED = 2, 8
# Kind of rows, sequence, batch, timed batches per round. A batch has 20 bytes per token; 2048 x 512 has 21 MB.
PLACES = (
    ("concatenate", 1024, 32, 60),
    ("concatenate", 2048, 512, 12),
    ("whole", 1024, 32, 60),
    ("whole", 2048, 512, 12),
    ("pairs", 2048, 128, 20),
    ("teacher", 1024, 32, 20),
    ("made", 2048, 512, 20),
)
TOP_K = 32


class Made:
    """Batches that cost little to build: only their delivery is measured."""

    def __init__(self, sequence: int, batch: int) -> None:
        self._shape = (1, batch, sequence)

    def batch_at(self, step: int) -> dict[str, Any]:
        return {f"array{n}": np.full(self._shape, step, np.int32) for n in range(5)}


def write_pairs(folder: Path) -> None:
    chance = np.random.default_rng(1)
    letters = chance.integers(97, 123, 1 << 20, dtype=np.uint8).tobytes().decode()
    with (folder / "pairs.jsonl").open("w") as out:
        for _ in range(8000):
            texts = []
            for longest in (300, 400, 400):
                start, length = int(chance.integers(0, 1 << 19)), int(chance.integers(20, longest))
                texts.append(letters[start : start + length])
            out.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))) + "\n")


def source_of(folder: Path, place: int) -> Any:
    kind, sequence, batch, _ = PLACES[place]
    if kind == "made":
        return Made(sequence, batch)
    if kind == "pairs":
        data = Data(path=str(folder / "pairs.jsonl"), store=str(folder / "store"))
        return Batches(
            open_corpus(data, Dialect(ByteTokenizer()), sequence=sequence, pairs=True).rows, seed=0, batch=batch
        )
    packing = "concatenate" if kind == "teacher" else kind
    rows = feed_bench.opened(folder, sequence, packing).rows
    if kind == "teacher":
        rows = rows.with_extra(
            CachedTeacherRows(teacher_cache(folder, len(rows), sequence), ("v", "i", "t"), 1.0, np.int32)
        )
    return Batches(rows, seed=0, batch=batch)


def teacher_cache(folder: Path, rows: int, sequence: int) -> Path:
    """Write a cache of random teacher logits, once: the rows of each shard are equal."""
    cache = folder / "teacher"
    if (cache / "manifest.json").exists():
        return cache
    layout, chance = Layout(rows, sequence, TOP_K, 32_000, (1.0,)), np.random.default_rng(2)
    kept = (sequence, TOP_K)
    shards = TeacherShards(cache, Identity("", "", "", "", "", layout))
    shards.begin()
    for shard in range(layout.shards):
        row = layout.packed(
            chance.normal(size=kept).astype("f2"), chance.integers(0, 32_000, kept), np.zeros((sequence, 1), "f4")
        )
        shards.write(shard, [row] * len(layout.rows_of(shard)))
    return cache


_source: Any = None


def _set_source(folder: Path, place: int) -> None:
    global _source
    os.environ["JAX_PLATFORMS"] = "cpu"
    _source = source_of(folder, place)


def _build(step: int) -> Any:
    return _source.batch_at(step)


def loop(source: Any, put: Callable[[Any], Any]) -> Iterator[Any]:
    return (put(source.batch_at(step)) for step in count())


def one_thread(source: Any, put: Callable[[Any], Any]) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as executor:
        waiting: deque[Future[Any]] = deque()
        for step in count():
            waiting.append(executor.submit(lambda step: put(source.batch_at(step)), step))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()


def executor_ways(
    build: Callable[[int], Any], put: Callable[[Any], Any], builder: Executor, ahead: int
) -> Iterator[Any]:
    """Build in `builder`, place in one more thread."""
    with builder, ThreadPoolExecutor(1) as placer:
        built: deque[Future[Any]] = deque()
        placed: deque[Future[Any]] = deque()
        for step in count():
            built.append(builder.submit(build, step))
            if len(built) > ahead:
                placed.append(placer.submit(lambda batch: put(batch.result()), built.popleft()))
            if len(placed) > AHEAD:
                yield placed.popleft().result()


def ways(folder: Path, place: int, tree: str) -> dict[str, Iterator[Any]]:
    device = jax.devices("cpu")[0]

    def put(batch: Any) -> Any:
        return jax.device_put(batch, device)

    source = source_of(folder, place)
    if tree == "before":
        return {f"before, {n} processes": Feed(source, put, 0, 10**9, feeders=n) for n in (0, 1, 2)}  # type: ignore

    def pool(n: int) -> Executor:
        return ProcessPoolExecutor(n, get_context("spawn"), _set_source, (folder, place))

    return {
        "feed": iter(Feed(source, put, 0, 10**9)),
        "no thread": loop(source, put),
        "one thread": one_thread(source, put),
        "1 builder": executor_ways(source.batch_at, put, ThreadPoolExecutor(1), AHEAD),
        "2 builders": executor_ways(source.batch_at, put, ThreadPoolExecutor(2), 2 * AHEAD),
        "pool of 2 processes": executor_ways(_build, put, pool(2), 2 * AHEAD),
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children so far, in steps of 10 ms for children."""
    ticks = 0
    for child in active_children():
        ticks += sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def serve(tree: str, folder: Path, place: int) -> None:
    """Answer each line (the name of a way) with the wall seconds and CPU seconds of its batches."""
    jax.config.update("jax_platforms", "cpu")
    made = ways(folder, place, tree)
    for way in made.values():
        jax.block_until_ready(next(way))  # starts its processes
    print(json.dumps(list(made)), flush=True)
    for line in sys.stdin:
        way = made[json.loads(line)]
        time.sleep(1.0)  # the way before refills its queues
        for _ in range(UNTIMED):
            jax.block_until_ready(next(way))
        began = time.perf_counter(), cpu_seconds()
        for _ in range(PLACES[place][3]):
            jax.block_until_ready(next(way))
        print(json.dumps([time.perf_counter() - began[0], cpu_seconds() - began[1]]), flush=True)
    sys.stdout.flush()
    for feed in made.values():
        feed.close()  # type: ignore[attr-defined]


class Server:
    """The ways of one source tree, in a separate process."""

    def __init__(self, tree: str, folder: Path, source: Path, place: int) -> None:
        command = [sys.executable, __file__, "--serve", tree, "--folder", str(folder), "--place", str(place)]
        path = os.pathsep.join([str(source), str(ROOT)])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert self._process.stdout is not None
        self.names: list[str] = json.loads(self._process.stdout.readline())

    def seconds(self, name: str) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(name), file=self._process.stdin, flush=True)
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


def compared(folder: Path, place: int, rounds: int, trees: dict[str, Path]) -> dict[str, Any]:
    kind, sequence, batch, steps = PLACES[place]
    servers = [Server(tree, folder, source, place) for tree, source in trees.items()]
    at = {name: server for server in servers for name in server.names}
    took: dict[str, list[list[float]]] = {name: [] for name in at}
    for n in range(rounds):
        for name in [*at][n % len(at) :] + [*at][: n % len(at)]:
            took[name].append([seconds / steps for seconds in at[name].seconds(name)])
            print(f"  round {n}, {name}: {[round(1e3 * seconds, 2) for seconds in took[name][-1]]} ms", flush=True)
    for server in servers:
        server.close()
    first = took[next(iter(took))]
    line: dict[str, Any] = {"rows": kind, "sequence": sequence, "batch": batch, "rounds": rounds, "ways": {}}
    print(kind, sequence, batch)
    for name, rows in took.items():
        found: dict[str, Any] = {}
        line["ways"][name] = found
        for at_, unit in enumerate(("wall", "cpu")):
            ratios = [a[at_] / b[at_] for a, b in zip(rows, first, strict=True)]
            found[f"{unit}_ms"] = round(1e3 * statistics.median(row[at_] for row in rows), 2)
            found[f"{unit}_ratio"] = round(statistics.median(ratios), 2)
            found[f"{unit}_quartiles"] = [round(q, 2) for q in statistics.quantiles(ratios, n=4)]
        print(f"  {name:20}", *found.values(), flush=True)
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, help="the folder `src` of another version, to compare with")
    parser.add_argument("--folder", type=Path, help="where the store is kept; default: a temporary folder")
    parser.add_argument("--write", type=Path, default=ROOT / "results/feed_ways.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=int, help="only this line of the table")
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve, given.folder, given.place)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name)
        if not (folder / "text.jsonl").exists():
            feed_bench.write_text(folder)
            write_pairs(folder)
        trees = {"now": ROOT.parent / "src"} | ({"before": given.before} if given.before else {})
        places = range(len(PLACES)) if given.place is None else [given.place]
        for place in places:
            source_of(folder, place)  # one process makes the stores
        lines = [compared(folder, place, given.rounds, trees) for place in places]
    given.write.write_text(json.dumps({"cores": os.cpu_count(), "lines": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()
