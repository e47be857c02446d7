"""Predict the sealed runs once with the current model, and write the result into the page.

python bench/accuracy/open_sealed.py                  # refuses if the sealed runs were opened before
python bench/accuracy/open_sealed.py --again          # opens them again; the page then says how often
python bench/accuracy/open_sealed.py --development    # the unused development runs instead; writes nothing
python bench/accuracy/open_sealed.py --page           # only write the page again from the recorded results
python bench/accuracy/open_sealed.py --sources        # only write the sources of the unused runs into the page

It needs the programs that compile_unused.py stores. Results are in bench/results/sealed.jsonl, one line for each run
and opening. A run counts with the flags of its framework. If that program does not fit or was not compiled, it counts
with forerun's own options, if that one fits. If the flags are not certain, both results are recorded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import report
from compile_unused import compiled
from more_runs import development_runs, sealed_runs, side_of, unused_runs
from predict import scheduled_path
from runs import Run

from forerun.hardware.slices import slice_named
from forerun.planner.hlo import parse
from forerun.planner.time.prediction import step_time

RESULTS = Path(__file__).resolve().parents[1] / "results" / "sealed.jsonl"
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
WITHIN, FLAT = 0.15, 0.25


def predicted(run: Run) -> dict[str, Any]:
    """Return the prediction for the stored program of this run."""
    about = compiled(run)
    assert about is not None
    machine = slice_named(run.slice)
    module = parse(gzip.decompress(scheduled_path(run).read_bytes()).decode())
    step = step_time(module, machine, about["flops_per_step"] / machine.devices)
    return {
        "seconds": step.mid_seconds,
        "low_seconds": step.low_seconds,
        "high_seconds": step.high_seconds,
        "parts_seconds": dict(step.parts_seconds),
        "recomputed_by_compiler": about["recomputed_by_compiler"],
        "fits": True,
    }


def fits(run: Run) -> bool:
    """Whether a program of this run is stored."""
    about = compiled(run)
    return about is not None and bool(about["fits"]) and scheduled_path(run).exists()


def result(run: Run) -> dict[str, Any]:
    """Return the row of a run: the prediction that counts, or why there is none."""
    own = run.as_forerun_compiles()
    row: dict[str, Any] = {"name": run.name, "family": run.family, "generation": run.generation, "slice": run.slice}
    row |= {
        "published_seconds": run.seconds,
        "flags": run.flags.source if run.flags else "",
        "libtpu": version("libtpu"),
    }
    counted = run if fits(run) else own if fits(own) else None
    if counted is None:
        about = compiled(run) or {}
        why = about.get("failure") or f"does not fit: {about.get('hbm_peak_bytes', 0) / 2**30:.1f} GiB"
        return row | {"fits": False, "reason": why if about else "not compiled"}
    row |= predicted(counted) | {"own_options": counted is own}
    others = [other for other in run.variants()[1:] if fits(other)]
    row["other_flags_seconds"] = [predicted(other)["seconds"] for other in others]
    return row | {"error": row["seconds"] / run.seconds - 1}


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def summary(rows: list[dict[str, Any]]) -> dict[str, float | int]:
    """Return the figures of some predicted runs, and those of a flat range around the same predictions."""
    errors = [abs(row["error"]) for row in rows]
    flat = [abs(row["published_seconds"] / row["seconds"] - 1) <= FLAT for row in rows]
    return {
        "runs": len(rows),
        "median_error": statistics.median(errors),
        "within": statistics.mean(error <= WITHIN for error in errors),
        "worst_error": max(errors),
        "covered": statistics.mean(
            row["low_seconds"] <= row["published_seconds"] <= row["high_seconds"] for row in rows
        ),
        "width": statistics.mean((row["high_seconds"] - row["low_seconds"]) / row["seconds"] for row in rows),
        "flat_covered": statistics.mean(flat),
    }


def summaries(rows: list[dict[str, Any]]) -> str:
    """Return the summary table: all generations, each of them, and all without the compiler's own recomputation."""
    lines = [
        "| generation | runs | median error | within 15 % | worst | in the printed range | its mean width "
        "| in a flat 25 % range | its width |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = {"all": rows} | {name: [row for row in rows if row["generation"] == name] for name in GENERATIONS}
    groups[r"all, without \*"] = [row for row in rows if not row["recomputed_by_compiler"]]
    for name, some in groups.items():
        if some:
            s = summary(some)
            lines.append(
                f"| {name} | {s['runs']} | {s['median_error']:.1%} | {s['within']:.0%} | {s['worst_error']:.1%} "
                f"| {s['covered']:.0%} | {s['width']:.0%} | {s['flat_covered']:.0%} | {2 * FLAT:.0%} |"
            )
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of runs, in the columns of the held-out table, and the runs without a prediction."""
    lines = ["| run | published s | predicted s | error | range s |", "|---|---|---|---|---|"]
    order = {name: n for n, name in enumerate(GENERATIONS)}
    rows = sorted(rows, key=lambda row: (order[row["generation"]], row["name"]))
    for row in (row for row in rows if row["fits"]):
        marks = (r" \*" if row["recomputed_by_compiler"] else "") + (" †" if row["own_options"] else "")
        lines.append(
            f"| {row['name']}{marks} | {row['published_seconds']:.3f} | {row['seconds']:.3f} | {row['error']:+.1%} "
            f"| {row['low_seconds']:.3f} to {row['high_seconds']:.3f} |"
        )
    without = [f"- {row['name']}: {row['reason']}" for row in rows if not row["fits"]]
    if without:
        lines += ["", "No prediction:", "", *without]
    return "\n".join(lines) + "\n"


def opened_text(rows: list[dict[str, Any]]) -> str:
    """Return the sentence about the openings, and the goals."""
    openings = sorted({row["opening"] for row in rows})
    last = [row for row in rows if row["opening"] == openings[-1] and row["fits"]]
    s = summary(last)
    words = {True: "reached", False: "missed"}
    text = (
        "The sealed runs were opened once.\n"
        if len(openings) == 1
        else (
            f"The sealed runs were opened {len(openings)} times; the figures are those of the last time. "
            + " ".join(
                f"Opening {n}: median error {summary(some)['median_error']:.1%}."
                for n in openings[:-1]
                for some in ([row for row in rows if row["opening"] == n and row["fits"]],)
            )
            + "\n"
        )
    )
    return (
        f"{text}\nGoals for the {s['runs']} sealed runs:\n\n"
        f"- median error of at most 5 %: {s['median_error']:.1%}, {words[s['median_error'] <= 0.05]};\n"
        f"- 90 % within 15 %: {s['within']:.0%}, {words[s['within'] >= 0.9]};\n"
        f"- 80 % in the printed range: {s['covered']:.0%}, {words[s['covered'] >= 0.8]}.\n\n"
    )


def sources() -> str:
    """Return a list of the unused families: their side, their runs, and where and how these differ from the jobs."""
    side, families = side_of(), defaultdict(list)
    for run in unused_runs():
        families[run.family].append(run)
    lines = []
    for family, some in families.items():
        places = "; ".join(dict.fromkeys(f"`{run.source}`" for run in some))
        notes = "; ".join(dict.fromkeys(run.note for run in some if run.note))
        text = f"{notes[:1].upper()}{notes[1:]}." if notes else ""
        names = ", ".join(run.name for run in some)
        lines.append(f"- **{family}** ({side[family]}): {names}. {places}. {text}".rstrip())
    return "\n".join(lines) + "\n"


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write the last opening between the markers of the page."""
    last = [row for row in rows if row["opening"] == max(row["opening"] for row in rows)]
    report.write_blocks(
        {
            "sealed summary": opened_text(rows) + summaries([row for row in last if row["fits"]]),
            "sealed": table(last),
        }
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--development", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--sources", action="store_true")
    given = parser.parse_args(arguments)
    if given.development:
        rows = [result(run) for run in development_runs()]
        print(table(rows) + "\n" + summaries([row for row in rows if row["fits"]]))
        return 0
    if given.sources:
        report.write_blocks({"sealed sources": sources()})
        return 0
    known = recorded()
    if given.page:
        write_page(known)
        return 0
    if known and not given.again:
        print(f"{RESULTS} exists: the sealed runs were opened already. --again opens them again.", file=sys.stderr)
        return 1
    opening = 1 + max((row["opening"] for row in known), default=0)
    known += [{"opening": opening, **result(run)} for run in sealed_runs()]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in known))
    write_page(known)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
