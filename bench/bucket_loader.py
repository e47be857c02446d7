"""The loader of a run for benchmarks: verified reads of a store in a bucket, through the cache, in both orders."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.mixture import Mixture
from forerun.data.reads.block_cache import BlockCache
from forerun.data.reads.block_reader import BlockReader
from forerun.data.reads.patient_reads import ReadCounts
from forerun.data.tokens.store import open_store
from forerun.reporter import LineReporter
from forerun.storage.open_folder import folder_at

MB = 1e6


def bucket_batches(
    address: str,
    shuffle: str,
    *,
    sequence: int,
    batch: int,
    counts: ReadCounts,
    held: range | None = None,
    cache: tuple[Path, int] | None = None,
    seed: int = 0,
) -> Batches:
    """Return the batches of a host.

    Args:
      address: the store, as in `gs://bench/KEY`.
      shuffle: `rows` or `blocks`.
      sequence: positions of a row.
      batch: rows of all hosts.
      counts: counts what is read.
      held: the rows of a batch that the host reads; None: all.
      cache: the file of the block cache and its limit in bytes; None: no cache.
      seed: selects the order.
    """
    folder = folder_at(address)
    blocks = None if cache is None else BlockCache(*cache, counts, LineReporter(sys.stdout))
    documents = dataclasses.replace(open_store(folder).train, reader=BlockReader(folder, blocks, counts))
    row_bytes = documents.token_bytes * sequence if shuffle == "blocks" else None
    rows = Mixture([Concatenated(documents, sequence)], row_bytes=row_bytes)
    if rows.block_orders:
        extent = rows.block_orders[0].sizes.block_rows * sequence
        documents = dataclasses.replace(documents, extent_tokens=extent)
        rows = Mixture([Concatenated(documents, sequence)], row_bytes=row_bytes)
    places = None if held is None else np.arange(held.start, held.stop)
    return Batches(rows, seed=seed, batch=batch, held=places)


def resident_mb() -> float:
    """Return the memory of this process in MB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / MB


def peak_mb() -> float:
    """Return the largest memory of this process so far in MB."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 / MB for line in file if line.startswith("VmHWM"))


def fitted_growth(steps: list[int], values: list[float]) -> float:
    """Return the slope of a line through the values, by least squares."""
    slope: Any = np.polyfit(np.asarray(steps, float), np.asarray(values, float), 1)[0]
    return float(slope)
