"""Data at scale: a store of 15T tokens (60 TB, 52,000 units) that 64 hosts read from a bucket, in both orders.

    python bench/scale_data.py                 # about 10 minutes on two idle cores; needs 3 GB of disk
    python bench/scale_data.py --quick         # small units and few steps, as a try; writes no results

The store has one real unit, which `range_server.py` serves under 52,000 names with the protocol of Google Cloud
Storage. What is measured:

1. Opening the index of 52,000 units, from a disk and from the bucket: seconds and memory.
2. The latency of a read of 16 KiB without and with 30 ms that the server adds.
3. The reads of some of 64 hosts, with the real order, reader, checksums and cache, with the added latency: requests and
   bytes per step, seconds of one batch alone, and seconds per step with reading ahead.

The cost of an epoch is the number of requests times the price of the service (forerun.hardware.object_storage). Writes
bench/results/scale_data.json. `python bench/data_scale_page.py` writes the tables of docs/explanation/data-scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from range_server import Server, served

RESULT = Path(__file__).parent / "results" / "scale_data.json"
UNITS, UNIT_TOKENS = 52_000, 288_500_000
HOSTS, SEQUENCE, BATCH = 64, 4096, 1024  # 4.2M tokens per step
SAMPLED_HOSTS = (0, 21, 63)
LATENCY_SECONDS = 0.03
CACHE_BYTES = 4_000_000_000
STEPS = {"rows": (16, 64), "blocks": (160, 128)}  # before the measurement, so that all blocks in use are fetched; in it
FREE_BYTES = 4_000_000_000
MB = 1e6


def opened(address: str) -> dict[str, Any]:
    """Return the seconds and the memory that opening a store needs in this process."""
    from bucket_loader import peak_mb, resident_mb

    from forerun.data.tokens.store import open_store
    from forerun.storage.open_folder import folder_at

    before, began = resident_mb(), time.perf_counter()
    store = open_store(folder_at(address))
    tokens = store.train.tokens
    seconds = time.perf_counter() - began
    kept, peak = resident_mb() - before, peak_mb() - before
    return {
        "seconds": round(seconds, 3),
        "kept_mb": round(kept, 1),
        "peak_mb": round(peak, 1),
        "tokens": tokens,
        "documents": len(store.train),
    }


def read_seconds(count: int = 200) -> float:
    """Return the median time of a read of 16 KiB, one after the other."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "gcs", "bucket": "bench", "path": "k/"}).result()
    times = []
    for number in range(count):
        began = time.perf_counter()
        store.read(f"unit-{number:05d}-of-{UNITS:05d}/train.tokens", byte_range=slice(0, 16384)).result()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def host_reads(host: int, shuffle: str, cache: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return what the reads of one host need per step."""
    from bucket_loader import bucket_batches, resident_mb

    from forerun.data.read_ahead import ReadAhead
    from forerun.data.reads.patient_reads import ReadCounts

    counts, each = ReadCounts(), BATCH // HOSTS
    batches = bucket_batches(
        "gs://bench/k",
        shuffle,
        sequence=SEQUENCE,
        batch=BATCH,
        counts=counts,
        held=range(host * each, (host + 1) * each),
        cache=(cache, CACHE_BYTES),
    )
    warm, steps = given["steps"][shuffle]
    with ReadAhead(batches, warm) as ahead:
        for step in range(warm):
            ahead.batch_at(step)
    before, began = counts.to_json(), time.perf_counter()
    with ReadAhead(batches, warm + steps) as ahead:
        for step in range(warm, warm + steps):
            ahead.batch_at(step)
    seconds = time.perf_counter() - began
    after = counts.to_json()
    alone = []
    for step in range(warm + steps, warm + steps + 8):
        began = time.perf_counter()
        batches.batch_at(step)
        alone.append(time.perf_counter() - began)
    return {
        "host": host,
        "shuffle": shuffle,
        "steps": steps,
        "rows_of_store": len(batches.rows),
        "requests_per_step": (after["requests"] - before["requests"]) / steps,
        "bytes_per_step": (after["read_bytes"] - before["read_bytes"]) / steps,
        "step_seconds": seconds / steps,
        "batch_alone_seconds": statistics.median(alone),
        "resident_mb": round(resident_mb(), 1),
        "failed_requests": after["failed_requests"],
    }


def summed(lines: list[dict[str, Any]], steps_of_epoch: int, documents: int) -> dict[str, Any]:
    """Return the numbers of all hosts: the mean of the sampled ones times their number, and the cost of an epoch."""
    from forerun.hardware.object_storage import ReadLoad, request_price, step_reads

    price, shuffle = request_price("gs"), lines[0]["shuffle"]
    assert price is not None
    requests, size = (statistics.mean(line[key] for line in lines) for key in ("requests_per_step", "bytes_per_step"))
    load = ReadLoad(
        "gs",
        BATCH,
        SEQUENCE,
        4,
        hosts=HOSTS,
        rows=lines[0]["rows_of_store"],
        steps=steps_of_epoch,
        documents=documents,
        cache_bytes=CACHE_BYTES,
    )
    expected = step_reads(load, shuffle)
    return {
        "shuffle": shuffle,
        "requests_per_step_and_host": round(requests, 2),
        "bytes_per_step_and_host": round(size),
        "requests_per_step": round(requests * HOSTS, 1),
        "bytes_per_step": round(size * HOSTS),
        "read_per_used_byte": round(size / (BATCH // HOSTS * SEQUENCE * 4), 2),
        "step_seconds": round(max(line["step_seconds"] for line in lines), 4),
        "batch_alone_seconds": round(statistics.mean(line["batch_alone_seconds"] for line in lines), 4),
        "usd_per_epoch": round(requests * HOSTS * steps_of_epoch / 1000 * price.usd_per_1000_reads),
        "usd_per_1000_reads": price.usd_per_1000_reads,
        "price_date": price.date,
        "planned_requests_per_step": round(expected.requests, 1),
        "planned_bytes_per_step": round(expected.read_bytes),
    }


def child(what: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Return what a fresh process measures, so that no measurement warms up another."""
    command = [sys.executable, "-P", __file__, "--child", json.dumps(what)]
    found = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    line: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return line


def measured(folder: Path, server: Server, steps: dict[str, Any], index_bytes: int) -> dict[str, Any]:
    """Return all measurements of a store that exists."""
    variables = server.environment
    index: dict[str, Any] = {"units": UNITS, "bytes": index_bytes}
    index["disk"] = child(["opened", str(folder / "store" / "k")], variables)
    index["bucket"] = child(["opened", "gs://bench/k"], variables)
    print(json.dumps(index), flush=True)
    base = child(["read_seconds"], variables)["seconds"]
    server.set_latency(LATENCY_SECONDS)
    latency = {"base_seconds": base, "added_seconds": LATENCY_SECONDS, "seconds": None}
    latency["seconds"] = child(["read_seconds"], variables)["seconds"]
    print(json.dumps(latency), flush=True)
    hosts, totals = [], []
    tokens = index["disk"]["tokens"]
    for shuffle in ("rows", "blocks"):
        some = []
        for host in SAMPLED_HOSTS:
            cache = folder / f"cache-{shuffle}-{host}"
            some.append(child(["host_reads", str(host), shuffle, str(cache), json.dumps({"steps": steps})], variables))
            cache.unlink(missing_ok=True)
            print(json.dumps(some[-1]), flush=True)
        hosts += some
        totals.append(summed(some, tokens // (BATCH * SEQUENCE), index["disk"]["documents"]))
        print(json.dumps(totals[-1]), flush=True)
    return {"tokens": tokens, "index": index, "latency": latency, "orders": totals, "sampled": hosts}


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--quick", action="store_true")
    words.add_argument("--folder", type=Path, help="for the store and the caches; by default a temporary one")
    words.add_argument("--child", help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.child:
        name, *rest = json.loads(given.child)
        if name == "read_seconds":
            print(json.dumps({"seconds": read_seconds()}))
        elif name == "opened":
            print(json.dumps(opened(*rest)))
        else:
            host, shuffle, cache, settings = rest
            print(json.dumps(host_reads(int(host), shuffle, Path(cache), json.loads(settings))))
        return
    from synthetic_store import write_index, write_unit

    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < FREE_BYTES:
            sys.exit(f"{folder} needs {FREE_BYTES / 1e9:g} GB of free disk")
        summary = write_unit(folder / "store" / "k", UNIT_TOKENS // (50 if given.quick else 1))
        index_bytes = write_index(folder / "store" / "k", summary, UNITS)
        with served(folder / "store") as server:
            steps = {"rows": (4, 8), "blocks": (8, 8)} if given.quick else STEPS
            found = measured(folder, server, steps, index_bytes)
    settings = {"cores": os.cpu_count(), "hosts": HOSTS, "batch": BATCH, "sequence": SEQUENCE}
    if not given.quick:
        result = settings | {"cache_bytes": CACHE_BYTES} | found
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
