"""Write the figures of results/accuracy.jsonl into docs/explanation/accuracy.md and draw docs/assets/accuracy.svg.

python bench/accuracy/report.py
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

from evaluate import rows, summary, uncalibrated
from predict import job_hash, recorded
from runs import runs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "accuracy.md"
PICTURE = ROOT / "docs" / "assets" / "accuracy.svg"
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
SIZE, EDGE = 520, 56
# Runs that are not counted are not drawn.
COLOURS = {"calibration": "#8a8f98", "held-out": "#1f6feb", "development": "#1f6feb"}


def main() -> int:
    found = rows(replay=False)
    write_blocks(blocks(found))
    PICTURE.write_text(picture([row for row in found if row["half"] in COLOURS]))
    return 0


def write_blocks(texts: dict[str, str]) -> None:
    """Replace the generated parts of the page, each between its markers."""
    text = PAGE.read_text()
    for name, block in texts.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text, count = marked.subn(lambda match: match[1] + block + match[2], text)  # noqa: B023
        assert count == 1, f"{PAGE} has no place for {name}"
    PAGE.write_text(text)


def blocks(found: list[dict[str, Any]]) -> dict[str, str]:
    """Return the generated parts of the page by the names of their markers."""
    development = [row for row in found if row["half"] == "development"]
    return {
        "summary": summaries(development),
        "development": table(development),
        "not counted": table([row for row in found if row["half"] == "not counted"]),
        "other flags": other_flags(found),
        "flags": flag_sources(),
        "not predicted": not_predicted(),
    }


def summaries(development: list[dict[str, Any]]) -> str:
    lines = ["| runs of | generation | runs | median error | within 20 % | worst | in the printed range |"]
    lines.append("|---|---|---|---|---|---|---|")
    for generation in ("all", *GENERATIONS):
        some = [row for row in development if generation in ("all", row["generation"])]
        lines += summary_line("development", generation, some)
    same = [row for row in development if not row["recomputed_by_compiler"]]
    lines += summary_line("development", r"all, without \*", same)
    lines += summary_line("development", "all, before calibration", [uncalibrated(row) for row in development])
    return "\n".join(lines) + "\n"


def other_flags(found: list[dict[str, Any]]) -> str:
    """Return the table of runs whose flags are not certain, with the results of both sets."""
    first = {row["name"]: row for row in found if row["half"] == "development"}
    lines = ["| run | published s | flags | error | other flags | error |", "|---|---|---|---|---|---|"]
    for row in found:
        if row["half"] == "other flags" and row["name"] in first:
            used = first[row["name"]]
            lines.append(
                f"| {row['name']} | {row['published_seconds']:.3f} | {used['flags']} | {used['error']:+.1%} "
                f"| {row['flags']} | {row['error']:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def flag_sources() -> str:
    """Return the list of sources of the flags, each with its runs."""
    by_source: dict[str, list[str]] = {}
    for run in runs():
        by_source.setdefault(run.flags.source if run.flags else "forerun's own", []).append(run.name)
    return "".join(f"- {', '.join(names)}: `{source}`\n" for source, names in by_source.items())


def summary_line(half: str, generation: str, some: list[dict[str, Any]]) -> list[str]:
    if not some:
        return []
    s = summary(some)
    return [
        f"| {half} | {generation} | {s['runs']} | {s['median_error']:.1%} | {s['within_20_percent']:.0%} "
        f"| {s['worst_error']:.1%} | {s['covered']:.0%} |"
    ]


def table(some: list[dict[str, Any]]) -> str:
    return run_table(sorted(some, key=lambda row: (GENERATIONS.index(row["generation"]), row["name"])))


def run_table(some: list[dict[str, Any]]) -> str:
    """Return a table with a line for each run, in their order."""
    lines = ["| run | published s | predicted s | error | range s |", "|---|---|---|---|---|"]
    for row in some:
        star = r" \*" if row["recomputed_by_compiler"] else ""
        lines.append(
            f"| {row['name']}{star} | {row['published_seconds']:.3f} | {row['seconds']:.3f} | {row['error']:+.1%} "
            f"| {row['low_seconds']:.3f} to {row['high_seconds']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def not_predicted() -> str:
    """Return the list of runs that could not be predicted, with the reasons."""
    known = recorded()
    lines = []
    for run in runs():
        row = known.get(job_hash(run))
        if row is None:
            lines.append(f"- {run.name}: not compiled yet")
        elif not row.get("seconds"):
            peak = row.get("hbm_peak_bytes")
            why = f"does not fit: {peak / 2**30:.1f} GiB" if peak else row.get("failure", "").splitlines()[0]
            lines.append(f"- {run.name}: {why}")
    return ("\n".join(lines) or "None.") + "\n"


def picture(found: list[dict[str, Any]], band: float = 0.2) -> str:
    """Return the SVG of predicted against published seconds, both logarithmic, with a band around equal ones."""
    values = [row[key] for row in found for key in ("published_seconds", "seconds")]
    low, high = math.log10(min(values)) - 0.15, math.log10(max(values)) + 0.15

    def x(seconds: float) -> float:
        return EDGE + (math.log10(seconds) - low) / (high - low) * (SIZE - 2 * EDGE)

    def y(seconds: float) -> float:
        return SIZE - x(seconds)

    first, last, inner = 10**low, 10**high, SIZE - 2 * EDGE
    below, above = 1 - band, 1 + band
    corners = ((first, first * below), (last, last * below), (last, last * above), (first, first * above))
    edge = " ".join(f"{x(p):.1f},{y(q):.1f}" for p, q in corners)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" font-family="sans-serif" font-size="12">',
        f"<title>Predicted against published step time of {len(found)} runs</title>",
        f'<rect width="{SIZE}" height="{SIZE}" fill="#ffffff"/>',
        f'<clipPath id="plot"><rect x="{EDGE}" y="{EDGE}" width="{inner}" height="{inner}"/></clipPath>',
        f'<polygon points="{edge}" fill="#e8eef9" clip-path="url(#plot)"/>',
        f'<line x1="{x(first):.1f}" y1="{y(first):.1f}" x2="{x(last):.1f}" y2="{y(last):.1f}" stroke="#b9c4d6"/>',
        f'<rect x="{EDGE}" y="{EDGE}" width="{inner}" height="{inner}" fill="none" stroke="#555"/>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        tick = 10.0**power
        parts.append(f'<text x="{x(tick):.1f}" y="{SIZE - EDGE + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{EDGE - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for half, colour in COLOURS.items():
        for row in found:
            if row["half"] == half:
                at = f'cx="{x(row["published_seconds"]):.1f}" cy="{y(row["seconds"]):.1f}"'
                title = f"<title>{row['name']}: {row['error']:+.1%}</title>"
                parts.append(f'<circle {at} r="4.5" fill="{colour}" fill-opacity="0.8">{title}</circle>')
    drawn = [half for half in COLOURS if any(row["half"] == half for row in found)]
    for number, half in enumerate(drawn):
        top = EDGE + 20 + 18 * number
        parts.append(f'<circle cx="{EDGE + 16}" cy="{top - 4}" r="4.5" fill="{COLOURS[half]}"/>')
        parts.append(f'<text x="{EDGE + 26}" y="{top}">{half}</text>')
    parts.append(f'<text x="{SIZE / 2}" y="{SIZE - 14}" text-anchor="middle">published seconds a step</text>')
    middle = SIZE / 2
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">predicted seconds</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
