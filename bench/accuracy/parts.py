"""Show the effect of each part of a change of the step-time model: predict stored programs with several revisions.

python bench/accuracy/parts.py --before REV --part collectives=REV --part ranges=REV ... --after REV [--record]

`--before` names the revision before the change, `--after` the one with all parts, and each `--part` one with only this
part. The part "runs" needs no revision: it predicts the runs as they are described now (their flags, batch and model)
with the model of `--before`. All other parts predict the runs as they were described before. A revision of a part may
have other ranges; only a part with "range" in its name shows them. Every revision predicts in a child process with its
own sources, so the product needs no switches. The programs must be stored (predict.py). Changes must be committed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evaluate import summary
from predict import job_hash, scheduled_path
from report import PAGE, write_blocks
from runs import Run, runs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "accuracy_parts.jsonl"
# In a child process with the sources of another revision: read programs, write predictions.
PREDICT = """
import gzip, inspect, json, sys
from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time
takes_chip = list(inspect.signature(step_time).parameters)[1] == "chip"
for line in sys.stdin:
    path, name = json.loads(line)
    place = slice_named(name)
    with gzip.open(path, "rt") as file:
        step = step_time(parse(file.read()), place.chip if takes_chip else place)
    print(json.dumps([step.mid_seconds, step.low_seconds, step.high_seconds]), flush=True)
"""
DESCRIBE = """
import json, sys
from runs import runs
print(json.dumps([[r.name, r.slice, r.seconds, r.unlike, r.job] for r in runs()]))
"""


def unpacked(revision: str, folder: Path) -> Path:
    """Return a folder with the sources and benches of a revision."""
    target = folder / revision.replace("/", "_")
    if not target.exists():
        target.mkdir()
        archive = subprocess.run(
            ["git", "archive", revision, "src", "bench/accuracy"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", str(target)], input=archive.stdout, check=True)
    return target


def _child(tree: Path, code: str, lines: list[Any]) -> list[Any]:
    paths = os.pathsep.join([str(tree / "src"), str(tree / "bench" / "accuracy")])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], input=text, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def described(tree: Path) -> list[Run]:
    """Return the runs as a revision describes them."""
    fields = ("name", "slice", "seconds", "unlike", "job")
    (found,) = _child(tree, DESCRIBE, [])
    return [Run(family="", source="", **dict(zip(fields, row, strict=True))) for row in found]


def predicted(tree: Path, some: list[Run]) -> list[dict[str, Any]]:
    """Return a row for each stored program: its prediction by the model of a revision."""
    stored = [run for run in some if scheduled_path(run).exists()]
    steps = _child(tree, PREDICT, [[str(scheduled_path(run)), run.slice] for run in stored])
    return [
        {
            "name": run.name,
            "program": job_hash(run),
            "counted": not run.unlike,
            "published_seconds": run.seconds,
            "seconds": middle,
            "low_seconds": low,
            "high_seconds": high,
            "error": middle / run.seconds - 1,
        }
        for run, (middle, low, high) in zip(stored, steps, strict=True)
    ]


def flat(row: dict[str, Any]) -> dict[str, float]:
    """Return the range of every TPU step before this change."""
    return {"low_seconds": 0.75 * row["seconds"], "high_seconds": 1.25 * row["seconds"]}


def line(name: str, rows: list[dict[str, Any]]) -> str:
    counted = [row for row in rows if row["counted"]]
    s = summary(counted, 15)
    width = sum((row["high_seconds"] - row["low_seconds"]) / 2 / row["seconds"] for row in counted) / len(counted)
    return (
        f"| {name} | {s['runs']} | {s['median_error']:.1%} | {s['within_15_percent']:.0%} | {s['worst_error']:.1%} "
        f"| {s['covered']:.0%} | {width:.0%} |"
    )


def common(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the runs that every part counts, so that the lines compare the same runs."""
    names = set.intersection(*({row["name"] for row in rows if row["counted"]} for rows in found.values()))
    return {part: [row for row in rows if row["name"] in names] for part, rows in found.items()}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    head = "| model and programs | runs | median error | within 15 % | worst | in the printed range | mean ± |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    lines += [line(part, rows) for part, rows in common(found).items()]
    last = list(found)[-1]
    lines.append(line(f"{last}, all counted runs", found[last]))
    return "\n".join(lines) + "\n"


def evaluated(
    before: str, parts: dict[str, str], after: str, current: list[Run], old: list[Run] | None
) -> dict[str, Any]:
    """Return the rows of each part. `old` are the runs as described before; None: as `before` describes them."""
    with tempfile.TemporaryDirectory(prefix="accuracy-parts-") as name:
        folder = Path(name)
        first = unpacked(before, folder)
        old = described(first) if old is None else old
        found = {"before": predicted(first, old), "1 runs as compiled": predicted(first, current)}
        for part, revision in parts.items():
            rows = predicted(unpacked(revision, folder), old)
            found[part] = rows if "range" in part else [{**row, **flat(row)} for row in rows]
        found["all parts"] = predicted(unpacked(after, folder), current)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", default="HEAD")
    parser.add_argument("--part", action="append", default=[], metavar="NAME=REV")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name} and the table in {PAGE.name}")
    asked = parser.parse_args(arguments)
    parts = dict(part.split("=", 1) for part in asked.part)
    found = evaluated(asked.before, parts, asked.after, runs(), None)
    print(table(found))
    if asked.record:
        rows = [{"part": part, **row} for part, each in found.items() for row in each]
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_blocks({"parts": table(found)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
