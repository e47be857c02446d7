"""Simulate the recorded programs again with the current constants of the step-time model, and print a summary.

python bench/accuracy/evaluate.py             # table and summary of the runs; needs the cache of predict.py
python bench/accuracy/evaluate.py --record    # also writes the new figures into bench/results/accuracy.jsonl
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from typing import Any

from predict import RESULTS, job_hash, recomputed_by_compiler, recorded, scheduled_path
from runs import Run, runs

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.chip_model import chip_model_of
from forerun.planner.time.collectives.torus import Torus
from forerun.planner.time.prediction import step_time
from forerun.planner.time.simulation import Simulation


def replayed(run: Run) -> dict[str, Any]:
    """Return the model's prediction for the scheduled program of this run."""
    scheduled = gzip.decompress(scheduled_path(run).read_bytes()).decode()
    module, slice = parse(scheduled), slice_named(run.slice)
    step = step_time(module, slice)
    return {
        "uncalibrated_seconds": Simulation(module, chip_model_of(slice.chip), slice.chip.name, Torus.of(slice))
        .run()
        .seconds,
        "seconds": step.mid_seconds,
        "low_seconds": step.low_seconds,
        "high_seconds": step.high_seconds,
        "parts_seconds": dict(step.parts_seconds),
        "recomputed_by_compiler": recomputed_by_compiler(scheduled),
    }


def rows(replay: bool) -> list[dict[str, Any]]:
    """Return a row for each published run that compiled, with its error: predicted / published - 1.

    A run whose flags are not certain has a second row, with `half` "other flags".
    """
    known = recorded()
    found = []
    for run in runs():
        for number, variant in enumerate(run.variants()):
            job = job_hash(variant)  # the same for two runs of one program
            row = known.get(job, {}) | {"name": run.name, "slice": run.slice, "job": job}
            if replay and scheduled_path(variant).exists():
                row |= replayed(variant)
            if not row.get("seconds"):
                continue
            half = "not counted" if run.unlike else "development"
            row |= {"half": "other flags" if number else half, "generation": run.generation, "family": run.family}
            row |= {"flags": variant.flags.label if variant.flags else "forerun's own"}
            row |= {"published_seconds": run.seconds, "error": row["seconds"] / run.seconds - 1}
            found.append(row)
    return found


def summary(some: list[dict[str, Any]], percent: int = 20) -> dict[str, float | int]:
    """Return the figures of some runs, with the share whose error is at most `percent`."""
    errors = [abs(row["error"]) for row in some]
    inside = [row["low_seconds"] <= row["published_seconds"] <= row["high_seconds"] for row in some]
    return {
        "runs": len(some),
        "median_error": statistics.median(errors),
        f"within_{percent}_percent": sum(error <= percent / 100 for error in errors) / len(errors),
        "worst_error": max(errors),
        "covered": sum(inside) / len(inside),
    }


def uncalibrated(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run with its prediction before calibration."""
    scale = row["uncalibrated_seconds"] / row["seconds"]
    return {
        **row,
        "error": row["uncalibrated_seconds"] / row["published_seconds"] - 1,
        "low_seconds": row["low_seconds"] * scale,
        "high_seconds": row["high_seconds"] * scale,
    }


def main(arguments: list[str]) -> int:
    found = rows(replay=True)
    for row in found:
        parts = " ".join(f"{part.split()[0]} {seconds:.3f}" for part, seconds in row["parts_seconds"].items())
        print(
            f"{row['half'][:4]} {row['name'][:48]:48} {row['published_seconds']:8.3f} {row['seconds']:8.3f} "
            f"{row['error']:+7.1%}  {parts}"
        )
    for half in ("development", "other flags", "not counted"):
        chosen = [row for row in found if row["half"] == half]
        for generation in ("all", *sorted({row["generation"] for row in chosen})):
            some = [row for row in chosen if generation in ("all", row["generation"])]
            print(half, generation, {k: round(v, 3) for k, v in summary(some).items()} if some else "none")
    if "--record" in arguments:
        current = {job_hash(variant) for run in runs() for variant in run.variants()}
        shown = {row["job"] for row in found}
        others = [row for job, row in recorded().items() if job in current - shown]
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in (*found, *others)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
