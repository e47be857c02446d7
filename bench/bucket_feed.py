"""How long a run waits for data in a bucket, with 30 ms added to every request.

    python bench/bucket_feed.py              # about three minutes

A local server answers the reads of Google Cloud Storage (`range_server.py`). The store has one real unit under many
names (`synthetic_store.py`). The consumer takes a batch of 64 rows of 2,048 tokens and then sleeps for the rest of a
fifth of a second, as a run whose devices need 200 ms per step. The first steps are excluded: there the reading begins.
Rows are read in random order (`data.shuffle: rows`), the harder case. "Without read-ahead" is the feed alone, with its
one thread. Writes bench/results/bucket_feed.json and bucket_feed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from range_server import BUCKET, served
from synthetic_store import write_index, write_unit

ROOT = Path(__file__).parent
LATENCY_SECONDS, STEP_SECONDS, ROWS, SEQUENCE, WARM, GOAL = 0.03, 0.2, 64, 2048, 10, 0.02
UNIT_TOKENS = 16_000_000
# name, units, cache in GiB, whether batches are read ahead
CASES = (
    ("32 units, no cache", 32, 0.0, True),
    ("32 units, cache", 32, 0.5, True),
    ("52,000 units, no cache", 52_000, 0.0, True),
    ("32 units, no cache, without read-ahead", 32, 0.0, False),
)


def measured(address: str, cache_gib: float, ahead: bool, steps: int, scratch: Path) -> dict[str, Any]:
    """Return what a consumer of batches sees. Runs in a process of its own, with an empty memory."""
    from forerun.data.feed import Feed
    from forerun.data.order.batches import Batches
    from forerun.data.order.concatenated import Concatenated
    from forerun.data.read_ahead import ReadAhead
    from forerun.data.reads.block_cache import BlockCache
    from forerun.data.reads.store_reads import StoreReads
    from forerun.data.tokens.store import open_store
    from forerun.reporter import LineReporter
    from forerun.storage.open_folder import folder_at

    reads = StoreReads()
    if cache_gib:
        reads.cache = BlockCache(scratch / "blocks", int(cache_gib * 2**30), reads.counts, LineReporter(sys.stdout))
    store = open_store(folder_at(address), reads=reads)
    batches = Batches(Concatenated(store.train, SEQUENCE), seed=0, batch=ROWS)
    source = ReadAhead(batches, WARM + steps) if ahead else batches
    with Feed(source, lambda batch: batch, 0, WARM + steps) as feed:
        before, began = 0.0, 0.0
        for step in range(WARM + steps):
            if step == WARM:
                before, began = feed.waited_seconds, time.perf_counter()
            due = time.perf_counter() + STEP_SECONDS
            next(feed)
            time.sleep(max(0.0, due - time.perf_counter()))
        seconds, waited = time.perf_counter() - began, feed.waited_seconds - before
    if isinstance(source, ReadAhead):
        source.close()
    counts = reads.counts
    return {
        "steps": steps,
        "step_seconds": seconds / steps,
        "wait_share": waited / seconds,
        "requests_per_step": round(counts.requests / (WARM + steps), 1),
        "mb_per_step": round(counts.read_bytes / (WARM + steps) / 1e6, 2),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="steps that are measured in each case")
    parser.add_argument("--write", type=Path, default=ROOT / "results/bucket_feed.json")
    parser.add_argument("--one", nargs=4, metavar=("ADDRESS", "GIB", "AHEAD", "SCRATCH"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        address, gib, ahead, scratch = given.one
        print(json.dumps(measured(address, float(gib), ahead == "yes", given.steps, Path(scratch))))
        return
    cases = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bucket"
        summary = write_unit(folder / "stores", UNIT_TOKENS)
        for title, units, gib, ahead in CASES:
            write_index(folder / "stores", summary, units)
            with served(folder, LATENCY_SECONDS) as server, tempfile.TemporaryDirectory() as scratch:
                address = f"gs://{BUCKET}/stores"
                command = [sys.executable, "-P", __file__, "--steps", str(given.steps), "--one", address, str(gib)]
                path = f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"
                answer = subprocess.run(
                    [*command, "yes" if ahead else "no", scratch],
                    env=os.environ | server.environment | {"PYTHONPATH": path},
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
            cases.append({"case": title} | json.loads(answer.splitlines()[-1]))
            print(cases[-1], flush=True)
    result = {
        "latency_seconds": LATENCY_SECONDS,
        "rows": ROWS,
        "sequence": SEQUENCE,
        "goal_wait_share": GOAL,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "cases": cases,
    }
    given.write.write_text(json.dumps(result, indent=2) + "\n")
    given.write.with_suffix(".md").write_text(table(result))


def table(result: dict[str, Any]) -> str:
    said = "| store | wait for data | requests/step | MB/step | memory |\n| --- | ---: | ---: | ---: | ---: |\n"
    for case in result["cases"]:
        said += (
            f"| {case['case']} | {case['wait_share']:.1%} | {case['requests_per_step']:g} | {case['mb_per_step']:g} "
            f"| {case['memory_mb']} MB |\n"
        )
    return (
        "Share of the step time in which a run waits for data: 64 rows of 2,048 tokens, 5 steps/s, 30 ms added to "
        "every request (`python bench/bucket_feed.py`; goal: below 2%). "
        f"{result['cores']} cores, load {result['load']}:\n\n{said}"
    )


if __name__ == "__main__":
    main()
