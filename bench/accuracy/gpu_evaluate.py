"""Predict the step times of the stored GPU programs with the current constants, and compare them with published ones.

python bench/accuracy/gpu_evaluate.py --half calibration    # needs the programs that gpu_predict.py stored
python bench/accuracy/gpu_evaluate.py --record              # all halves; writes bench/results/gpu_accuracy.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import evaluate
from gpu_predict import compiled, program_file
from gpu_runs import GENERATIONS, generation, half, halves, runs
from runs import Run

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time

RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu_accuracy.jsonl"
ORDER = ("calibration", "held-out", "not counted")
PERCENT = 25


def predicted(run: Run, known: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction for the stored program of a run, and its error: predicted / published - 1."""
    machine = slice_named(run.slice)
    module = parse(gzip.decompress(program_file(run).read_bytes()).decode())
    step = step_time(module, machine, known["flops_per_step"] / machine.devices)
    return {
        "published_seconds": run.seconds,
        "seconds": step.mid_seconds,
        "low_seconds": step.low_seconds,
        "high_seconds": step.high_seconds,
        "parts_seconds": dict(step.parts_seconds),
        "error": step.mid_seconds / run.seconds - 1,
    }


def rows(wanted: str | None) -> list[dict[str, Any]]:
    """Return a row for each compiled run of a half, or of all halves. Only programs that fit are predicted."""
    half_of = halves(runs())
    found = []
    for run in runs():
        known = compiled(run)
        if known is None or wanted not in (None, half(run, half_of)):
            continue
        row = {"half": half(run, half_of), "generation": generation(run), "family": run.family, **known}
        if known["fits"]:
            row |= predicted(run, known)
        found.append(row)
    return sorted(found, key=lambda row: (ORDER.index(row["half"]), list(GENERATIONS).index(row["generation"])))


def summary(some: list[dict[str, Any]]) -> dict[str, float | int]:
    return evaluate.summary(some, PERCENT)


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=ORDER)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)
    found = rows(given.half)
    for row in found:
        if "seconds" not in row:
            print(f"{row['half'][:4]} {row['name'][:32]:32} {row.get('failure', 'does not fit')[:120]}")
            continue
        parts = " ".join(f"{part.split()[0]} {seconds:.3f}" for part, seconds in row["parts_seconds"].items())
        print(
            f"{row['half'][:4]} {row['name'][:32]:32} {row['published_seconds']:8.3f} {row['seconds']:8.3f} "
            f"{row['error']:+7.1%}  {parts}"
        )
    for name in ORDER:
        chosen = [row for row in found if row["half"] == name and "seconds" in row]
        for kind in ("all", *GENERATIONS):
            if some := [row for row in chosen if kind in ("all", row["generation"])]:
                print(name, kind, {key: round(value, 3) for key, value in summary(some).items()})
    if given.record:
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
