"""Throughput of the feed: tokens per second of packed batches that are built from a warm store and placed.

    python bench/feed.py                     # about a minute on two idle cores

The store has 50 million tokens (bytes; documents of 30 to 3,000) and is packed in both ways. The consumer takes placed
batches as fast as possible. Start-up is excluded: the clock starts at the tenth batch. Writes bench/results/feed.json
and feed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from forerun.config.schema import Data
from forerun.data.corpus import Corpus, Dialect, open_corpus
from forerun.data.feed import Feed
from forerun.data.order.batches import Batches
from forerun.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent
TOKENS, WARM, GOAL = 50_000_000, 10, 2_000_000
PLACES = (("concatenate", 1024, 32), ("concatenate", 2048, 128), ("whole", 1024, 32), ("whole", 2048, 128))


def opened(folder: Path, sequence: int, packing: str) -> Corpus:
    """Return the corpus. The first call builds the store; later calls find it by the digest of its content."""
    data = Data(path=str(folder / "text.jsonl"), store=str(folder / "store"), packing=packing)  # type: ignore[arg-type]
    return open_corpus(data, Dialect(ByteTokenizer()), sequence=sequence)


def write_text(folder: Path) -> None:
    chance = np.random.default_rng(0)
    lengths = chance.integers(30, 3000, TOKENS // 1500)
    letters = chance.integers(97, 123, int(lengths.max()) + TOKENS // 100, dtype=np.uint8).tobytes().decode()
    with (folder / "text.jsonl").open("w") as out:
        for length, start in zip(
            lengths.tolist(), chance.integers(0, TOKENS // 100, len(lengths)).tolist(), strict=True
        ):
            out.write(json.dumps({"text": letters[start : start + length]}) + "\n")


def tokens_per_second(folder: Path, sequence: int, batch: int, packing: str, seconds: float) -> dict[str, Any]:
    batches = Batches(opened(folder, sequence, packing).rows, seed=0, batch=batch)
    device = jax.devices("cpu")[0]

    def place(batch: Any) -> Any:
        return jax.device_put(batch, device)

    with Feed(batches, place, 0, 10**9) as feed:
        for _ in range(WARM):
            jax.block_until_ready(next(feed))
        began, taken = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            jax.block_until_ready(next(feed))
            taken += 1
        rate = taken * batch * sequence / (time.perf_counter() - began)
    return {
        "packing": packing,
        "sequence": sequence,
        "batch": batch,
        "tokens_per_second": round(rate),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time to measure each line of the table")
    parser.add_argument("--write", type=Path, default=ROOT / "results/feed.json")
    given = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        print("packing      sequence  batch  tokens/s")
        for packing, sequence, batch in PLACES:
            line = tokens_per_second(folder, sequence, batch, packing, given.seconds)
            print(f"{packing:11}  {sequence:8}  {batch:5}  {line['tokens_per_second']:,}", flush=True)
            lines.append(line)
    best = max(line["tokens_per_second"] for line in lines)
    result = {"cores": os.cpu_count(), "store_tokens": TOKENS, "goal": GOAL, "best": best, "lines": lines}
    given.write.parent.mkdir(exist_ok=True)
    given.write.write_text(json.dumps(result, indent=2) + "\n")
    given.write.with_suffix(".md").write_text(table(lines))
    print(json.dumps(result))


def table(lines: Sequence[dict[str, Any]]) -> str:
    said = "| packing | sequence x batch | tokens/s |\n| --- | --- | ---: |\n"
    for line in lines:
        rate = f"{line['tokens_per_second'] / 1e6:.1f}M"
        said += f"| {line['packing']} | {line['sequence']} x {line['batch']} | {rate} |\n"
    return f"Tokens per second on two cores, placed on a CPU device (`python bench/feed.py`; goal: 2M):\n\n{said}"


if __name__ == "__main__":
    main()
