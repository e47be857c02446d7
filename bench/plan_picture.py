"""Draw docs/assets/plan.svg: the table of a real plan, as a terminal shows it.

python bench/plan_picture.py        # a minute; needs the extras `plan` and `plan-gpu`, no TPU and no GPU
"""

from __future__ import annotations

import html
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from forerun.config.load import load
from forerun.planner.compile.pool import CompileProgress, answers
from forerun.planner.compile.request import requests_of, slices_named
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.report.table import print_table
from forerun.planner.search.ranking import in_order, order_note
from forerun.resolve.resolved_job import ResolvedJob

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "assets" / "plan.svg"
JOB, SLICES = HERE / "jobs" / "lora-llama3.1-8b.yaml", ("v5e-8", "v6e-8", "h100-1", "h100-8", "a100-80-8", "4090-1")
COLUMNS, CHARACTER_WIDTH = 118, 12
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
# Dark, because a dark terminal is readable on white and on dark pages.
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        (72, 79, 88),
        (255, 123, 114),
        (86, 211, 100),
        (227, 179, 65),
        (88, 166, 255),
        (210, 153, 255),
        (57, 197, 207),
        (230, 237, 243),
    ],
)


def main() -> int:
    job = load(JOB, ()).job
    questions = requests_of(ResolvedJob(job), slices_named(SLICES))
    with CompileProgress(questions) as progress:
        verdicts = in_order(answers(questions, progress.phase), "balanced", Tariff())
    note = order_note(verdicts, "balanced", Tariff())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="standard")
    command = f"forerun plan {JOB.name} --on {','.join(SLICES)}"
    console.print(f"[green]$[/] [bold]{command}[/]\n", highlight=False)
    print_table(
        console, verdicts, f"{job.name}, batch {job.batch} x {job.sequence}, remat {job.remat.policy}", notes=[note]
    )
    svg = console.export_svg(title="forerun plan", theme=THEME, unique_id="plan", font_aspect_ratio=0.6)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(without_links(without_blanks(svg)))
    return 0


def without_blanks(svg: str) -> str:
    """Return the SVG with every text starting at its first letter: some viewers drop leading spaces."""

    def moved(found: re.Match[str]) -> str:
        head, x, middle, tail, content = found.groups()
        text = content.replace("&#160;", " ")
        start = float(x) + CHARACTER_WIDTH * (len(text) - len(text.lstrip()))
        width = CHARACTER_WIDTH * len(html.unescape(text.strip()))
        kept = text.strip().replace(" ", "&#160;")
        return f'{head}x="{start:g}"{middle}textLength="{width}"{tail}{kept}</text>' if kept else ""

    text = r'(<text [^>]*?)x="([\d.]+)"([^>]*?)textLength="[\d.]+"([^>]*>)([^<]*)</text>'
    return re.sub(text, moved, svg)


def without_links(svg: str) -> str:
    """Return the SVG with local fonts: Rich's SVG loads its font from a server."""
    svg = re.sub(r"\s*@font-face \{.*?\}\n", "\n", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: (Fira Code, monospace|arial)", f"font-family: {FONT}", svg)
    links = set(re.findall(r"https?://[^\s\"')]+", svg)) - {"http://www.w3.org/2000/svg"}
    assert not links, links
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
