"""Cost of block checksums: the CPU time of a feed with and without them, measured alternately in one run.

    python bench/blocks.py                    # a few minutes on two idle cores
    python bench/blocks.py --before OTHER/src # also compares with the feed of another source tree

The store is that of `bench/feed.py`. Each variant is a separate process: `on` verifies every block that it reads, `off`
reads the same files without verification, `before` is the other source tree. In each round, each process takes the same
batches through its feed, one process after the other and in changing order. The figure is the median over rounds of the
ratio of CPU times (all threads of the process), which depend less on other load than wall time.
Writes bench/results/blocks.json and blocks.md.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import feed as feed_bench
import jax

from forerun.data.feed import Feed
from forerun.data.order.batches import Batches

ROOT = Path(__file__).parent
GOAL = 1.03
ROWS = 1280  # in each round
PLACES = feed_bench.PLACES


def batches_of(variant: str, folder: Path, packing: str, sequence: int, batch: int) -> Batches:
    corpus = feed_bench.opened(folder, sequence, packing)
    for part in corpus.parts if variant == "off" else ():
        for unit in part.store.train.units:
            del unit["blocks"]
        plan: Any = getattr(part.rows, "_plan", None)
        for array in (plan.items, plan.starts) if plan else ():
            array._blocks = None
    return Batches(corpus.rows, seed=0, batch=batch)


def serve(variant: str, folder: Path) -> None:
    """Answer each line (place, first step, steps) with the CPU seconds of these steps."""
    jax.config.update("jax_platforms", "cpu")
    device = jax.devices("cpu")[0]
    opened = [batches_of(variant, folder, *place) for place in PLACES]
    print("ready", flush=True)
    for line in sys.stdin:
        place, start, steps = json.loads(line)
        with Feed(opened[place], lambda batch: jax.device_put(batch, device), start, start + steps + 1) as feed:
            jax.block_until_ready(next(feed))
            began = time.process_time()
            for placed in feed:
                jax.block_until_ready(placed)
            print(time.process_time() - began, flush=True)


class Server:
    """A variant in its own process."""

    def __init__(self, variant: str, folder: Path, source: Path) -> None:
        command = [sys.executable, __file__, "--serve", variant, "--folder", str(folder)]
        path = os.pathsep.join([str(source), str(ROOT)])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def seconds(self, place: int, start: int, steps: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([place, start, steps]), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def compared(servers: dict[str, Server], place: int, rounds: int) -> dict[str, Any]:
    packing, sequence, batch = PLACES[place]
    steps = ROWS // batch
    for server in servers.values():
        server.seconds(place, 0, steps)
    took: dict[str, list[float]] = {variant: [] for variant in servers}
    for n in range(rounds):
        order = [*servers][n % len(servers) :] + [*servers][: n % len(servers)]
        for variant in order:
            took[variant].append(servers[variant].seconds(place, (n + 1) * steps, steps))
    line: dict[str, Any] = {"packing": packing, "sequence": sequence, "batch": batch}
    for other in [name for name in servers if name != "on"]:
        ratios = [a / b for a, b in zip(took["on"], took[other], strict=True)]
        line[f"over_{other}"] = round(statistics.median(ratios), 3)
        line[f"over_{other}_quartiles"] = [round(q, 3) for q in statistics.quantiles(ratios, n=4)]
    line["cpu_us_per_row"] = {name: round(1e6 * statistics.median(some) / ROWS, 1) for name, some in took.items()}
    print(json.dumps(line), flush=True)
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--before", type=Path, help="the folder `src` of another version, to compare with")
    parser.add_argument("--folder", type=Path, help="where the store is kept; default: a temporary folder")
    parser.add_argument("--write", type=Path, default=ROOT / "results/blocks.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve, given.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name)
        if not (folder / "text.jsonl").exists():
            feed_bench.write_text(folder)
        sources = {"on": ROOT.parent / "src", "off": ROOT.parent / "src", "before": given.before}
        servers = {
            variant: Server(variant, folder, source) for variant, source in sources.items() if source is not None
        }
        lines = [compared(servers, place, given.rounds) for place in range(len(PLACES))]
        for server in servers.values():
            server.close()
    result = {"cores": os.cpu_count(), "store_tokens": feed_bench.TOKENS, "goal": GOAL, "lines": lines}
    given.write.write_text(json.dumps(result, indent=2) + "\n")
    given.write.with_suffix(".md").write_text(table(lines))


def table(lines: Sequence[dict[str, Any]]) -> str:
    names = {"over_off": "over this version without checksums", "over_before": "over the version before them"}
    columns = [column for column in names if column in lines[0]]
    said = f"| packing | sequence x batch | {' | '.join(names[column] for column in columns)} |\n"
    said += "| --- | --- |" + " ---: |" * len(columns) + "\n"
    for line in lines:
        ratios = " | ".join(f"{line[column]:.3f}" for column in columns)
        said += f"| {line['packing']} | {line['sequence']} x {line['batch']} | {ratios} |\n"
    title = "CPU time of a feed with checksums, as a ratio (`python bench/blocks.py`"
    return f"{title}; goal: {GOAL} over the same version without them):\n\n{said}"


if __name__ == "__main__":
    main()
