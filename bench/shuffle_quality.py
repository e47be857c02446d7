"""How well `data.shuffle: blocks` mixes the data, compared with `rows` and with no shuffling.

    python bench/shuffle_quality.py            # 15 minutes of CPU time

Figures of the order, for 1,220,703 rows (10 GB of 2,048 tokens with 4 bytes each) and batches of 64 and 1,024 rows:

- distinct blocks: share of the rows of a batch that are the first of their block in the batch.
- neighbours: correlation between the positions in the data of two rows that follow each other in the order.
- batch mean, 100-step mean: variance of the mean position of the rows of a batch, or of 100 batches, relative to rows
  that are drawn independently. 1 is independent; larger numbers mean that the content drifts from batch to batch.

Training: a small model on text that is sorted by topic, one epoch in each order with three seeds. Every topic has its
own words, so a model forgets topics that it has not seen for long. A topic has about 130 rows, which are 8 blocks of 16
rows; the real sizes of such small data would be blocks of one row. The loss is that of held-out documents of all
topics at the end. Writes bench/results/shuffle_quality.json.
"""

from __future__ import annotations

import io
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import forerun as fr
from forerun.config.schema import Job
from forerun.data.order.mixture import Mixture
from forerun.hardware.object_storage import BlockSizes
from forerun.track.display.make_display import make_display

RESULTS = Path(__file__).parent / "results/shuffle_quality.json"
ROWS, ROW_BYTES = 1_220_703, 8192
SMALL = BlockSizes(16, 32)  # for the small text: 64 blocks per lane and twice as many lanes as rows of a batch
ORDERS = ("rows", "blocks", "none")
TOPICS, WORDS, DOCUMENTS, SEEDS = 256, 40, 16, (0, 1, 2)


class ManyRows:
    """Rows without content."""

    sequence, digest = 2048, "many"

    def __len__(self) -> int:
        return ROWS


def drawn(order: str, count: int) -> NDArray[np.int64]:
    if order == "none":
        return np.arange(count)
    mixture = Mixture([ManyRows()], row_bytes=ROW_BYTES if order == "blocks" else None)  # type: ignore[list-item]
    return np.concatenate([mixture.drawn(np.arange(n, min(n + 65536, count)), 1) for n in range(0, count, 65536)])


def figures(order: str, batch: int) -> dict[str, float]:
    rows = drawn(order, ROWS // (100 * batch) * 100 * batch).reshape(-1, batch)
    block_rows = Mixture([ManyRows()], row_bytes=ROW_BYTES).block_orders[0].sizes.block_rows  # type: ignore[list-item]
    position = rows / ROWS
    means = position.mean(1)
    variance = 1 / 12 / batch
    return {
        "distinct_blocks": float(np.mean([len(np.unique(one)) for one in rows[::50] // block_rows])) / batch,
        "neighbours": float(np.corrcoef(position.ravel()[:-1], position.ravel()[1:])[0, 1]),
        "batch_mean_variance": float(means.var()) / variance,
        "hundred_steps_variance": float(means.reshape(-1, 100).mean(1).var()) / (variance / 100),
    }


def sorted_text(folder: Path) -> None:
    """Write documents that are sorted by topic, one per line."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(TOPICS):
            words = ["".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(WORDS)]
            for _ in range(DOCUMENTS):
                file.write(json.dumps({"text": " ".join(rng.choices(words, k=40))}) + "\n")


def trained(folder: Path, order: str, seed: int) -> float:
    """Return the validation loss after one epoch."""
    job = Job.model_validate(
        {
            "name": f"{order}-{seed}",
            "seed": seed,
            "runs": str(folder / "runs"),
            "model": {"layers": 2, "embed": 96, "heads": 2},
            "data": {
                "path": str(folder / "text.jsonl"),
                "tokenizer": "bytes",
                "packing": "concatenate",
                "validation": 0.04,
                "store": str(folder / "store"),
                "shuffle": "blocks" if order == "blocks" else "rows",
            },
            "sequence": 32,
            "batch": 16,
            "epochs": 1,
            "optimizer": {"lr": 3e-3},
            "precision": {"compute": "float32"},
            "device": "cpu",
            "remat": "none",
            "validation": {"batches": 100},
        }
    )
    permute, sizes_of = Mixture._permuted, BlockSizes.of
    if order == "none":
        Mixture._permuted = lambda self, inside, *rest: inside  # type: ignore[method-assign, assignment]
    BlockSizes.of = lambda *given: SMALL  # type: ignore[method-assign, assignment]
    try:
        run = fr.train(job, reporter=make_display(io.StringIO()))
    finally:
        Mixture._permuted, BlockSizes.of = permute, sizes_of  # type: ignore[method-assign]
    lines = map(json.loads, (Path(run.folder) / "metrics.jsonl").read_text().splitlines())
    return [float(line["validation_loss"]) for line in lines if "validation_loss" in line][-1]


def main() -> None:
    found: dict[str, Any] = {"rows": ROWS, "row_bytes": ROW_BYTES, "order": {}, "training": {}}
    for order in ORDERS:
        found["order"][order] = {str(batch): figures(order, batch) for batch in (64, 1024)}
        print(order, json.dumps(found["order"][order]), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sorted_text(folder)
        for order in ORDERS:
            losses = [trained(folder, order, seed) for seed in SEEDS]
            found["training"][order] = {"losses": losses, "mean": statistics.mean(losses)}
            print(order, losses, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
