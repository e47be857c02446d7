"""Write the figures of results/gpu_accuracy.jsonl into docs/explanation/accuracy.md and draw assets/accuracy-gpu.svg.

python bench/accuracy/gpu_report.py
"""

from __future__ import annotations

import sys
from typing import Any

from gpu_evaluate import ORDER, recorded, summary
from gpu_runs import GENERATIONS, runs
from report import COLOURS, ROOT, picture, run_table, write_blocks

PICTURE = ROOT / "docs" / "assets" / "accuracy-gpu.svg"
MEDIAN, SHARE_WITHIN, SHARE_COVERED = 0.10, 0.90, 0.80


def main() -> int:
    found = recorded()
    write_blocks(blocks(found))
    PICTURE.write_text(picture([row for row in _predicted(found) if row["half"] in COLOURS], band=0.25))
    return 0


def _predicted(found: list[dict[str, Any]], half: str | None = None) -> list[dict[str, Any]]:
    return [row for row in found if "seconds" in row and half in (None, row["half"])]


def blocks(found: list[dict[str, Any]]) -> dict[str, str]:
    """Return the generated parts of the page by the names of their markers."""
    return {
        "gpu summary": summaries(found),
        "gpu goal": goal(_predicted(found, "held-out")),
        **{f"gpu {half}": run_table(_predicted(found, half)) for half in ORDER},
        "gpu not predicted": not_predicted(found),
        "gpu sources": sources(),
    }


def summaries(found: list[dict[str, Any]]) -> str:
    lines = ["| runs of | generation | runs | median error | within 25 % | worst | in the printed range |"]
    lines.append("|---|---|---|---|---|---|---|")
    for half in ("held-out", "calibration"):
        own = _predicted(found, half)
        for generation in ("all", *GENERATIONS):
            if some := [row for row in own if generation in ("all", row["generation"])]:
                s = summary(some)
                lines.append(
                    f"| {half} | {generation} | {s['runs']} | {s['median_error']:.1%} | {s['within_25_percent']:.0%} "
                    f"| {s['worst_error']:.1%} | {s['covered']:.0%} |"
                )
    return "\n".join(lines) + "\n"


def goal(held: list[dict[str, Any]]) -> str:
    if not held:
        return "The held-out half is not predicted yet.\n"
    s = summary(held)
    words = {True: "reached", False: "missed"}
    return (
        f"Goals for the {s['runs']} held-out runs:\n\n"
        f"- median error of at most 10 %: {s['median_error']:.1%}, {words[s['median_error'] <= MEDIAN]};\n"
        f"- 90 % within 25 %: {s['within_25_percent']:.0%}, {words[s['within_25_percent'] >= SHARE_WITHIN]};\n"
        f"- 80 % in the printed range: {s['covered']:.0%}, {words[s['covered'] >= SHARE_COVERED]}.\n"
    )


def not_predicted(found: list[dict[str, Any]]) -> str:
    """Return the list of runs that were not predicted, with the reasons."""
    known = {row["name"]: row for row in found}
    lines = []
    for run in runs():
        row = known.get(run.name)
        if row is None:
            lines.append(f"- {run.name}: not compiled")
        elif "seconds" not in row:
            peak = row.get("peak_bytes")
            why = f"does not fit: {peak / 2**30:.1f} GiB" if peak else row["failure"].splitlines()[0]
            lines.append(f"- {run.name} ({row['half']}): {why}")
    return ("\n".join(lines) or "None.") + "\n"


def sources() -> str:
    """Return the list of runs by family, with the source and how each differs from the published program."""
    families: dict[str, list[Any]] = {}
    for run in runs():
        families.setdefault(run.family, []).append(run)
    lines = []
    for family, own in families.items():
        names = ", ".join(run.name for run in own)
        origin = "; ".join(dict.fromkeys(f"`{run.source}`" for run in own))
        notes = "; ".join(dict.fromkeys(note for run in own for note in (run.note, run.unlike) if note))
        lines.append(f"- **{family}**: {names}. {origin}." + (f" {notes[0].upper()}{notes[1:]}." if notes else ""))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
