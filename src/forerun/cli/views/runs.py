"""`forerun runs`: list the runs of a folder."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.watch.run_list import RunEntry

STYLES = {
    "running": "green",
    "waiting": "yellow",
    "silent": "red",
    "stopped": "red",
    "finished": "cyan",
    "broken": "bold red",
}


def run(args: argparse.Namespace) -> int:
    from forerun.watch.run_list import list_runs

    entries = list_runs(args.location)
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
    elif entries:
        print_table(entries)
    else:
        print(f"{args.location} has no runs")
    return 0


def print_table(entries: tuple[RunEntry, ...]) -> None:
    """Print one line per run."""
    from rich.table import Table
    from rich.text import Text

    from forerun.console import SafeConsole
    from forerun.safe_text import clean
    from forerun.units import Seconds

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "state", "step", "loss", "validation", "age", ""):
        right = title in ("step", "loss", "validation", "age")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "", overflow="ellipsis")
    for entry in entries:
        steps = f"/{entry.steps}" if entry.steps else ""
        stages = f"stage of {entry.stages}" if entry.stages else ""
        table.add_row(
            clean(entry.name),
            Text(entry.state, style=STYLES.get(entry.state, "")),
            "" if entry.state == "broken" else f"{entry.step}{steps}",
            "" if entry.loss is None else f"{entry.loss:.4f}",
            "" if entry.validation is None else f"{entry.validation:.4f}",
            "" if entry.age_seconds is None else str(Seconds(entry.age_seconds)),
            Text(clean(", ".join(part for part in (stages, entry.detail) if part)), style="dim"),
        )
    SafeConsole().print(table)
