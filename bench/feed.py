"""How many tokens a second reach the devices: packed batches of a warm store, built, carried and placed.

    python bench/feed.py                     # about a minute on two idle cores

A real store of 50 million tokens (bytes; documents of 30 to 3,000), packed both ways; the consumer takes placed batches
as fast as they come. Start-up is left out: the clock starts at the tenth batch. Writes bench/results/feed.json and
feed.md.
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
    """The store is built once, then found by its content."""
    data = Data(path=str(folder / "text.jsonl"), store=str(folder / "store"), packing=packing)
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


def tokens_per_second(
    folder: Path, sequence: int, batch: int, packing: str, feeders: int, seconds: float
) -> dict[str, Any]:
    batches = Batches(opened(folder, sequence, packing).rows, seed=0, batch=batch)
    device = jax.devices("cpu")[0]

    def place(batch: Any) -> Any:
        return jax.device_put(batch, device)

    with Feed(batches, place, 0, 10**9, feeders=feeders) as feed:
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
        "feeders": feeders,
        "tokens_per_second": round(rate),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each line of the table")
    parser.add_argument("--write", type=Path, default=ROOT / "results/feed.json")
    given = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        print("packing      sequence  batch  feeders  tokens/s")
        for packing, sequence, batch in PLACES:
            for feeders in (0, 1, 2):
                line = tokens_per_second(folder, sequence, batch, packing, feeders, given.seconds)
                rate = line["tokens_per_second"]
                print(f"{packing:11}  {sequence:8}  {batch:5}  {feeders:7}  {rate:,}", flush=True)
                lines.append(line)
    best = max(line["tokens_per_second"] for line in lines)
    result = {"cores": os.cpu_count(), "store_tokens": TOKENS, "goal": GOAL, "best": best, "lines": lines}
    given.write.parent.mkdir(exist_ok=True)
    given.write.write_text(json.dumps(result, indent=2) + "\n")
    given.write.with_suffix(".md").write_text(table(lines))
    print(json.dumps(result))


def table(lines: Sequence[dict[str, Any]]) -> str:
    said = "| packing | sequence x batch | a thread | 1 feeder | 2 feeders |\n| --- | --- | ---: | ---: | ---: |\n"
    for packing, sequence, batch in PLACES:
        rates = [
            f"{line['tokens_per_second'] / 1e6:.1f}M"
            for line in lines
            if (line["packing"], line["sequence"], line["batch"]) == (packing, sequence, batch)
        ]
        said += f"| {packing} | {sequence} x {batch} | {' | '.join(rates)} |\n"
    return f"Tokens a second, on two cores, placed on a CPU device (`python bench/feed.py`; goal 2M):\n\n{said}"


if __name__ == "__main__":
    main()
