"""Write the tables of docs/explanation/data-scale.md from the recorded results: `python bench/data_scale_page.py`.

With `--check`, nothing is written, and the exit code is 1 if a table differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "data-scale.md"
RESULTS = ROOT / "bench" / "results"
MATRIX = ROOT / "tests" / "faults" / "results" / "matrix.jsonl"
MISSING = "Not measured yet.\n"
TRIALS = {
    "data clean": "no faults: GCS and S3, 1 and 4 hosts, with and without cache",
    "data faults": "the same, and one read in fifty has a fault",
    "data deleted": "the same with faults and cache, and the cache is deleted during the run",
    "data damaged": "one byte of an object is changed: rejected, with the object's name",
}


def loaded(name: str) -> dict[str, Any] | None:
    file = RESULTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def rows_of(header: str, lines: list[tuple[Any, ...]]) -> str:
    columns = [name.strip() for name in header.split("|")]
    rules = ["---" if number == 0 else "---:" for number in range(len(columns))]
    rows = [columns, rules, *([str(cell) for cell in line] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def index_table() -> str:
    found = loaded("scale_data.json")
    if found is None:
        return MISSING
    index = found["index"]
    lines = [
        (place, f"{about['seconds']:.2f} s", f"{about['kept_mb']:.0f} MB", f"{about['peak_mb']:.0f} MB")
        for place, about in (("a local disk", index["disk"]), ("the bucket", index["bucket"]))
    ]
    told = f"{index['units']:,} units, {found['tokens'] / 1e12:.1f}T tokens, an index of {index['bytes'] / 1e6:.0f} MB"
    return f"{told}:\n\n" + rows_of("opened from | time | memory that stays | largest memory", lines)


def orders_table() -> str:
    found = loaded("scale_data.json")
    if found is None:
        return MISSING
    lines = []
    for one in found["orders"]:
        lines.append(
            (
                f"`{one['shuffle']}`",
                f"{one['requests_per_step_and_host']:.1f}",
                f"{one['requests_per_step']:,.0f}",
                f"{one['bytes_per_step_and_host'] / 1e6:.2f} MB",
                f"{one['read_per_used_byte']:.2f}",
                f"{1000 * one['batch_alone_seconds']:.0f} ms",
                f"{1000 * one['step_seconds']:.0f} ms",
                f"${one['usd_per_epoch']:,}",
                f"{one['planned_requests_per_step']:,.0f}",
            )
        )
    latency = found["latency"]
    told = (
        f"{found['hosts']} hosts, {found['batch']} rows of {found['sequence']} tokens per step, "
        f"{found['cache_bytes'] / 1e9:.0f} GB of cache per host. A read of 16 KiB takes "
        f"{1000 * latency['base_seconds']:.1f} ms from the server of the benchmark, and "
        f"{1000 * latency['seconds']:.1f} ms with the added {1000 * latency['added_seconds']:.0f} ms. Price of reads: "
        f"${found['orders'][0]['usd_per_1000_reads']} per 1,000 ({found['orders'][0]['price_date']})."
    )
    header = (
        "`data.shuffle` | requests per step and host | of all hosts | bytes per step and host | per byte used | "
        "one batch alone | per step, read ahead | requests of an epoch | `plan` says, all hosts"
    )
    return f"{told}\n\n" + rows_of(header, lines)


def soak_table() -> str:
    found = loaded("data_soak.json")
    if found is None:
        return MISSING
    lines = [
        (
            f"`{one['shuffle']}`",
            f"{one['steps']:,} ({one['epochs']:.2f} epochs)",
            f"{one['baseline_mb']:.0f} MB",
            f"{one['loader_peak_mb']:.0f} MB",
            f"{one['growth_mb_per_10000_steps']:+.2f} MB",
            f"{one['cache_file_mb']:.0f} MB",
            f"{one['steps_per_second']:.0f}",
        )
        for one in found["lines"]
    ]
    told = (
        f"A store of {found['store_bytes'] / 1e9:.1f} GB in {found['units']} units, a cache of "
        f"{found['cache_bytes'] / 1e6:.0f} MB, {found['batch']} rows of {found['sequence']} tokens per step. The goal: "
        f"less than {found['goal_mb']:.0f} MB."
    )
    header = (
        "`data.shuffle` | steps | process before | loader, largest | growth per 10,000 steps | cache file | "
        "steps per second"
    )
    return f"{told}\n\n" + rows_of(header, lines)


def trials_table() -> str:
    texts = MATRIX.read_text(encoding="utf-8").splitlines() if MATRIX.exists() else []
    trials = [line for line in map(json.loads, texts) if line["fault"] in TRIALS and "about" not in line]
    if not trials:
        return MISSING
    lines: list[tuple[Any, ...]] = []
    for name, told in TRIALS.items():
        some = [line for line in trials if line["fault"] == name]
        injected: Counter[str] = Counter()
        for line in some:
            injected.update(line.get("injected", {}))
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(injected.items())) or "none"
        if name == "data damaged":
            faults = "one byte each"
        reads = sum(line.get("reads", 0) for line in some)
        lines.append(
            (told, f"{sum(line['ok'] for line in some)} of {len(some)}", f"{reads:,}" if reads else "", faults)
        )
    return rows_of("trials | passed | reads | injected faults", lines)


def main(words: list[str]) -> int:
    before = text = PAGE.read_text(encoding="utf-8")
    blocks = {"index": index_table(), "orders": orders_table(), "soak": soak_table(), "trials": trials_table()}
    for name, block in blocks.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, count = marked.subn(lambda match: match[1] + block + match[2], text)  # noqa: B023
        assert count == 1, f"{PAGE} has no place for {name}"
    if "--check" in words:
        return int(text != before)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
