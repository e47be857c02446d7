"""Memory of the loader: 20,000 steps from a store of 10 GB in a bucket, with a cache of 500 MB, in both orders.

    python bench/data_soak.py                     # about 20 minutes on two idle cores; needs 2 GB of disk
    python bench/data_soak.py --steps 500         # a short try with a smaller store; writes no results

The store has 10 units, and `range_server.py` serves it with the protocol of Google Cloud Storage. Each order is read in
a process of its own, with the batches that a run reads: 64 rows of 2,048 tokens, about one epoch in 20,000 steps. The
process records its memory every 50 steps. `baseline` is its memory after all imports, before the store is opened. The
growth is a line through the values after the first 2,000 steps. Writes bench/results/data_soak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from range_server import served

ROOT = Path(__file__).parent
RESULT = ROOT / "results" / "data_soak.json"
UNITS, UNIT_TOKENS = 10, 250_000_000
SEQUENCE, BATCH, STEPS, WARM = 2048, 64, 20_000, 2_000
CACHE_BYTES = 500_000_000
GOAL_MB = 300.0
EVERY = 50
FREE_BYTES = 3_000_000_000


def worker(address: str, shuffle: str, cache: Path, steps: int) -> dict[str, Any]:
    """Read the batches of `steps` steps, and return what it needed."""
    import tensorstore  # noqa: F401  a part of the baseline, as jax is in a run
    from bucket_loader import bucket_batches, fitted_growth, peak_mb, resident_mb

    from forerun.data.feed import Feed
    from forerun.data.read_ahead import ReadAhead
    from forerun.data.reads.patient_reads import ReadCounts

    counts, baseline = ReadCounts(), resident_mb()
    batches = bucket_batches(
        address, shuffle, sequence=SEQUENCE, batch=BATCH, counts=counts, cache=(cache, CACHE_BYTES)
    )
    at: list[int] = []
    memory: list[float] = []
    began = time.perf_counter()
    with ReadAhead(batches, steps) as ahead, Feed(ahead, lambda batch: batch, 0, steps) as feed:
        for step, _ in enumerate(feed):
            if step % EVERY == 0:
                at.append(step)
                memory.append(round(resident_mb(), 2))
    seconds = time.perf_counter() - began
    warm = min(WARM, steps // 4)
    first = sum(a < warm for a in at)
    slope = fitted_growth(at[first:], memory[first:])
    return {
        "shuffle": shuffle,
        "steps": steps,
        "epochs": round(steps * BATCH / len(batches.rows), 3),
        "baseline_mb": round(baseline, 1),
        "peak_mb": round(peak_mb(), 1),
        "loader_peak_mb": round(peak_mb() - baseline, 1),
        "loader_mean_mb": round(sum(memory) / len(memory) - baseline, 1),
        "growth_mb_per_10000_steps": round(slope * 10_000, 2),
        "cache_file_mb": round(cache.stat().st_blocks * 512 / 1e6, 1),
        "steps_per_second": round(steps / seconds, 1),
        "counts": counts.to_json(),
        "memory_mb": memory[:: max(1, len(memory) // 80)],
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--steps", type=int, default=STEPS)
    words.add_argument("--folder", type=Path, help="for the store and the cache; by default a temporary one")
    words.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.worker:
        address, shuffle, cache = given.worker
        print(json.dumps(worker(address, shuffle, Path(cache), given.steps)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < FREE_BYTES:
            sys.exit(f"{folder} needs {FREE_BYTES / 1e9:g} GB of free disk")
        from synthetic_store import write_index, write_unit

        tokens = UNIT_TOKENS if given.steps == STEPS else max(5_000_000, UNIT_TOKENS * given.steps // STEPS)
        summary = write_unit(folder / "store" / "k", tokens)
        write_index(folder / "store" / "k", summary, UNITS)
        store_bytes = UNITS * 4 * summary["sides"]["train"]["tokens"]
        print(f"store of {store_bytes / 1e9:.1f} GB in {UNITS} units", flush=True)
        lines = []
        with served(folder / "store") as server:
            for shuffle in ("rows", "blocks"):
                lines.append(_measured(folder / f"cache-{shuffle}", shuffle, given.steps, server.environment))
                shown = {key: value for key, value in lines[-1].items() if key not in ("memory_mb", "counts")}
                print(json.dumps(shown), flush=True)
    reached = all(
        line["loader_peak_mb"] < GOAL_MB and line["growth_mb_per_10000_steps"] < 0.01 * GOAL_MB for line in lines
    )
    result = {
        "cores": os.cpu_count(),
        "store_bytes": store_bytes,
        "units": UNITS,
        "cache_bytes": CACHE_BYTES,
        "batch": BATCH,
        "sequence": SEQUENCE,
        "goal_mb": GOAL_MB,
        "reached": reached,
        "lines": lines,
    }
    if given.steps == STEPS:
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("reached" if reached else "NOT reached")


def _measured(cache: Path, shuffle: str, steps: int, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-P", __file__, "--steps", str(steps), "--worker", "gs://bench/k", shuffle, str(cache)]
    found = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    line: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return line


if __name__ == "__main__":
    main()
