"""Show the effect of each part of a change of the step-time model: predict stored programs with several revisions.

python bench/accuracy/parts.py --before REV --part collectives=REV ... [--after REV] [--record] [--sealed]

`--before` names the revision before the change, `--after` the one with all parts, and each `--part` one with only this
part. The first line has the predictions that `--before` recorded, of other programs: as forerun compiled them then, and
as it described the runs. All other lines predict the same programs: the runs as they are described and compiled now.
Ranges are flat, as before the change, except in the last line. Every revision predicts in a child process with its own
sources, so the product needs no switches. The programs must be stored (predict.py). Changes must be committed.

`--recorded` needs no programs: it has only the lines before and after, with what both revisions recorded.
`--sealed` uses the sealed runs instead. It refuses as long as they are not opened. They have no first line.
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
from more_runs import sealed_runs
from open_sealed import RESULTS as SEALED_RESULTS
from predict import RESULTS as PREDICTIONS
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
COUNTED = ("calibration", "held-out", "development")
FIRST, RUNS, FLAT, ALL = "before", "1 runs as compiled", "all parts, flat range", "all parts"


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


def recorded_at(revision: str) -> list[dict[str, Any]]:
    """Return a row for each run that a revision recorded and counted."""
    path = PREDICTIONS.relative_to(ROOT)
    text = subprocess.run(["git", "show", f"{revision}:{path}"], cwd=ROOT, check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in text.stdout.splitlines()]
    keys = ("name", "published_seconds", "seconds", "low_seconds", "high_seconds", "error")
    return [
        {"program": row["job"], "counted": True, **{key: row[key] for key in keys}}
        for row in rows
        if row.get("half") in COUNTED
    ]


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
    """Return the range of every TPU step before the change."""
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
    head = "| model and programs | runs | median error | within 15 % | worst | in the range | mean ± |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    lines += [line(part, rows) for part, rows in common(found).items()]
    if len(common(found)[ALL]) < sum(row["counted"] for row in found[ALL]):
        lines.append(line(f"{ALL}, all runs", found[ALL]))
    return "\n".join(lines) + "\n"


def evaluated(before: str, parts: dict[str, str], after: str, some: list[Run]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each line: the runs as described now, predicted by the model of each revision."""
    with tempfile.TemporaryDirectory(prefix="accuracy-parts-") as name:
        revisions = {RUNS: before, **parts, ALL: after}
        found = {part: predicted(unpacked(revision, Path(name)), some) for part, revision in revisions.items()}
    last = found.pop(ALL)
    flat_ones = {part: [{**row, **flat(row)} for row in rows] for part, rows in {**found, FLAT: last}.items()}
    return {**flat_ones, ALL: last}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", default="HEAD")
    parser.add_argument("--part", action="append", default=[], metavar="NAME=REV")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--recorded", action="store_true")
    kind.add_argument("--sealed", action="store_true")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name} and the table in {PAGE.name}")
    asked = parser.parse_args(arguments)
    if asked.sealed and not SEALED_RESULTS.exists():
        parser.error("the sealed runs are not opened yet")
    parts = dict(part.split("=", 1) for part in asked.part)
    if asked.recorded:
        last = recorded_at(asked.after)
        found = {FLAT: [{**row, **flat(row)} for row in last], ALL: last}
    else:
        found = evaluated(asked.before, parts, asked.after, sealed_runs() if asked.sealed else runs())
    if not asked.sealed:
        found = {FIRST: recorded_at(asked.before), **found}
    print(table(found))
    if asked.record:
        side = "sealed" if asked.sealed else "development"
        known = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
        rows = [row for row in known if row["side"] != side]
        rows += [{"side": side, "part": part, **row} for part, each in found.items() for row in each]
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_blocks({"sealed parts" if asked.sealed else "parts": table(found)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
