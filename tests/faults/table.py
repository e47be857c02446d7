"""Write the figures of results/matrix.jsonl into docs/explanation/faults.md and draw docs/assets/recovery.svg.

python tests/faults/table.py [RESULTS]
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from matrix import FAULTS, HERE, RESULTS, Fault

ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "explanation" / "faults.md"
PICTURE = ROOT / "docs" / "assets" / "recovery.svg"
Line = dict[str, Any]
WIDTH, LEFT, ROW, TOP = 720, 200, 30, 34
FONT = 'font-family="sans-serif" font-size="12"'
RECOVERY = ("recovery_seconds", "recover_seconds", "restart_seconds")
PARTS = {
    "imports_seconds": "Python, imports (mostly jax), devices",
    "data_seconds": "data (the tokens are in the token store)",
    "trace_seconds": "tracing the step",
    "lower_seconds": "lowering the step",
    "compile_seconds": "loading the compiled step from the cache",
    "state_seconds": "loading and verifying the state of the checkpoint",
}
WORDS = {
    "recovery_seconds": "recovery {} s",
    "recover_seconds": "recovery {} s",
    "detect_seconds": "detected in {} s",
    "restart_seconds": "{} s",
    "imports_seconds": "of which imports {} s",
    "stop_seconds": "exited in {} s",
    "seconds": "recovery {} s",
    "lost_steps": "{} steps repeated",
    "worst_relative": "loss differs by {}",
    "double_commits": "double commits {}",
    "late_steps": "found after {} steps",
}


def results(file: Path) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {fault.name: [] for fault in FAULTS}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        found[line["fault"]].append(line)
    return found


def values(lines: list[Line], key: str) -> list[float]:
    return [line[key] for line in lines if line.get(key) is not None]


def spoken(value: float) -> str:
    return f"{value:.0e}" if 0 < value < 0.01 else f"{value:.3g}"


def figures(fault: Fault, trials: list[Line]) -> str:
    """Return the median and the worst of each figure, as in `recovery 6.1 s, worst 9.8 s`."""
    parts = []
    for key in fault.figures:
        if found := values(trials, key):
            middle, worst = spoken(statistics.median(found)), spoken(max(found))
            told = WORDS[key].format(middle)
            parts.append(told if middle == worst else f"{told}, worst {worst}")
    inside = sum(line.get("inside_a_save", line.get("inside", False)) for line in trials)
    if inside and fault.name in ("sigkill", "kill in saves"):
        parts.append(f"{inside} inside a save")
    if fault.name == "storm" and trials:
        parts = [
            f"{sum(line['faults'].values())} faults in {line['wall_seconds'] / 60:.1f} min; "
            f"{line['goodput']:.2f} of the time useful, {line['of_best']:.2f} of the best possible"
            for line in trials
        ]
    return "; ".join(parts)


def table(found: dict[str, list[Line]]) -> str:
    lines = ["| fault, how, command | passed | median, worst | load |", "|---|---|---|---|"]
    for fault in FAULTS:
        trials = [line for line in found[fault.name] if "about" not in line]
        about = next((line["about"] for line in found[fault.name] if "about" in line), None)
        if not trials:
            continue
        passed = sum(line["ok"] for line in trials)
        load = f"{max(*about['load_before_after'], about.get('load_most', 0)):.0f}" if about else "?"
        ran = (about or {}).get("command", fault.command.format(n=len(trials)))
        command = ran.removeprefix("python tests/faults/")
        told = f"**{fault.what}**<br>{fault.how}<br>`{command}`"
        row = (told, f"{passed} of {len(trials)}", figures(fault, trials), load)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def missing(found: dict[str, list[Line]]) -> str:
    names = [fault.name for fault in FAULTS if not found[fault.name]]
    return f"Not in the results yet: {', '.join(names)}.\n" if names else "Every fault of the matrix is in the table.\n"


def failures(found: dict[str, list[Line]]) -> str:
    lines = []
    for fault in FAULTS:
        for line in found[fault.name]:
            if "about" not in line and not line["ok"]:
                told = {key: value for key, value in line.items() if key not in ("fault", "trial", "unix_seconds")}
                lines.append(f"- {fault.name}, trial {line['trial']}: `{json.dumps(told)[:300]}`")
    return ("\n".join(lines) or "None.") + "\n"


def restart(found: dict[str, list[Line]]) -> str:
    """Return the table of the parts of a restart: the median over all restarts of each."""
    trials = [line for line in found["restart"] if "about" not in line]
    if not trials:
        return "Not measured yet.\n"
    middle = {key: statistics.median(values(trials, key)) for key in (*PARTS, "restart_seconds", "steps_again")}
    rest = middle["restart_seconds"] - sum(middle[key] for key in PARTS)
    lines = ["| part | seconds |", "|---|---|"]
    lines += [f"| {words} | {middle[key]:.2f} |" for key, words in PARTS.items()]
    lines.append(f"| opening the run, the first step, and {middle['steps_again']:.0f} repeated steps | {rest:.2f} |")
    lines.append(f"| total: from the start of the process to a new step | {middle['restart_seconds']:.2f} |")
    return "\n".join(lines) + "\n"


def picture(found: dict[str, list[Line]]) -> str:
    """Return the SVG: a row of dots per fault that a run recovers from, one per trial, on a common axis of seconds."""
    rows = []
    for fault in FAULTS:
        seconds = [value for key in RECOVERY for value in values(found[fault.name], key)]
        if seconds:
            rows.append((fault.name, sorted(seconds)))
    most = max((seconds[-1] for _, seconds in rows), default=1.0)
    tick = next(size for size in (1, 2, 5, 10, 20, 50, 100, 1000) if most / size <= 8)
    last = math.ceil(most / tick) * tick
    height = TOP + ROW * len(rows) + 40

    def x(value: float) -> float:
        return LEFT + value / last * (WIDTH - LEFT - 24)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f"<title>Seconds from a fault to the next new step, {sum(len(s) for _, s in rows)} trials</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18">seconds from the fault to the next new step; the line is the median</text>',
    ]
    bottom = TOP + ROW * len(rows)
    for value in range(0, last + 1, tick):
        parts.append(f'<line x1="{x(value):.1f}" y1="{TOP}" x2="{x(value):.1f}" y2="{bottom}" stroke="#e3e7ee"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555">{value}</text>')
    for number, (name, seconds) in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{name} ({len(seconds)})</text>')
        for index, value in enumerate(seconds):
            shift = (index * 7 % 15) - 7  # vertical offset, so that equal values stay visible
            parts.append(
                f'<circle cx="{x(value):.1f}" cy="{y + shift:.1f}" r="2.6" fill="#1f6feb" fill-opacity="0.55"/>'
            )
        middle = x(statistics.median(seconds))
        ends = f'x1="{middle:.1f}" y1="{y - 11:.1f}" x2="{middle:.1f}" y2="{y + 11:.1f}"'
        parts.append(f'<line {ends} stroke="#111" stroke-width="2"/>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main(words: list[str]) -> int:
    found = results(Path(words[0]) if words else RESULTS)
    text = PAGE.read_text()
    blocks = {"table": table(found), "restart": restart(found), "missing": missing(found), "failures": failures(found)}
    for name, block in blocks.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", lambda m, b=block: m[1] + b + m[2], text, flags=re.DOTALL
        )
        assert count == 1, f"{PAGE} has no place for {name}"
    PAGE.write_text(text)
    PICTURE.write_text(picture(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
