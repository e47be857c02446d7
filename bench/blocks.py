"""What comparing checksums costs: batches of a feed with the checksums of blocks, and without, in turns in one run.

    python bench/blocks.py                        # a few minutes on two idle cores
    python bench/blocks.py --block-bytes 16384    # the same store with larger blocks

The stores are those of `bench/feed.py`, and one with a loss mask. Each round takes the same batches from two feeds, one
after the other in changing order: one compares every block that it reads, one reads the same files without checksums.
The figure is the median over rounds of the ratio of their CPU time (thread that builds, thread that places, and
consumer); other processes of the machine do not count in it. Writes bench/results/blocks.json and blocks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import feed as feed_bench
import jax

from forerun.data import blocks
from forerun.data.corpus import Corpus
from forerun.data.feed import Feed
from forerun.data.order.batches import Batches
from forerun.data.tokens import store

ROOT = Path(__file__).parent
GOAL = 1.03
PLACES = feed_bench.PLACES


def opened(folder: Path, sequence: int, packing: str, *, checked: bool) -> Corpus:
    """The corpus; unless `checked`, as one that an earlier version of forerun wrote."""
    corpus = feed_bench.opened(folder, sequence, packing)
    if checked:
        return corpus
    for part in corpus.parts:
        for unit in part.store.train.units:
            unit.pop("blocks")
        plan: Any = getattr(part.rows, "_plan", None)
        for array in (plan.items, plan.starts) if plan else ():
            array._blocks = None
    return corpus


class Side:
    """One of the two feeds that are compared."""

    def __init__(self, folder: Path, sequence: int, batch: int, packing: str, *, checked: bool) -> None:
        self._batches = Batches(opened(folder, sequence, packing, checked=checked).rows, seed=0, batch=batch)

    def run(self, start: int, steps: int) -> tuple[float, float]:
        """CPU and wall seconds for the steps from `start` on."""
        device = jax.devices("cpu")[0]
        with Feed(self._batches, lambda batch: jax.device_put(batch, device), start, start + steps) as feed:
            jax.block_until_ready(next(feed))
            cpu, wall = time.process_time(), time.perf_counter()
            for placed in feed:
                jax.block_until_ready(placed)
            return time.process_time() - cpu, time.perf_counter() - wall


def compared(folder: Path, sequence: int, batch: int, packing: str, rounds: int) -> dict[str, Any]:
    with_sums, without = (Side(folder, sequence, batch, packing, checked=checked) for checked in (True, False))
    steps = max(20, 6_000_000 // (sequence * batch))
    for side in (with_sums, without):
        side.run(0, steps)
    cpu, wall = [], []
    for n in range(rounds):
        order = (with_sums, without) if n % 2 else (without, with_sums)
        took = {side: side.run((n + 1) * steps, steps) for side in order}
        cpu.append(took[with_sums][0] / took[without][0])
        wall.append(took[with_sums][1] / took[without][1])
    return {
        "packing": packing,
        "sequence": sequence,
        "batch": batch,
        "cpu_ratio": round(statistics.median(cpu), 4),
        "cpu_quartiles": [round(q, 4) for q in statistics.quantiles(cpu, n=4)],
        "wall_ratio": round(statistics.median(wall), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block-bytes", type=int, default=blocks.BLOCK_BYTES)
    parser.add_argument("--write", type=Path, default=ROOT / "results/blocks.json")
    given = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        feed_bench.write_text(folder)
        print("packing      sequence  batch  CPU ratio (quartiles)     wall ratio")
        lines = []
        for packing, sequence, batch in PLACES:
            line = compared(folder, sequence, batch, packing, given.rounds)
            low, middle, high = line["cpu_quartiles"]
            print(
                f"{packing:11}  {sequence:8}  {batch:5}  {middle:.3f} ({low:.3f} to {high:.3f})   {line['wall_ratio']:.3f}",
                flush=True,
            )
            lines.append(line)


if __name__ == "__main__":
    main()
