"""`forerun runs`: list the runs of a folder."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.watch.run_list import RunEntry

DAY_SECONDS = 86_400
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
    """Print one line per run, then the reasons of stops and of folders that cannot be read."""
    from rich.table import Table
    from rich.text import Text

    from forerun.console import SafeConsole
    from forerun.safe_text import clean

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    titles = ["run", "state", "step", "loss", "validation", "age"]
    if any(entry.stages for entry in entries):
        titles.append("stage of")
    for title in titles:
        right = title in ("step", "loss", "validation", "age")
        table.add_column(title, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for entry in entries:
        steps = f"/{entry.steps}" if entry.steps else ""
        cells = (
            clean(entry.name),
            Text(entry.state, style=STYLES.get(entry.state, "")),
            "" if entry.state == "broken" else f"{entry.step}{steps}",
            "" if entry.loss is None else f"{entry.loss:.4f}",
            "" if entry.validation is None else f"{entry.validation:.4f}",
            "" if entry.age_seconds is None else age_text(entry.age_seconds),
            clean(entry.stages),
        )
        table.add_row(*cells[: len(titles)])
    console = SafeConsole()
    console.print(table)
    for entry in entries:
        if entry.detail:
            console.print(Text(clean(f"{entry.name}: {entry.detail}"), style="dim"))


def age_text(seconds: float) -> str:
    """Return an age. From two days on, whole days are enough."""
    from forerun.units import Seconds

    return str(Seconds(seconds)) if seconds < 2 * DAY_SECONDS else f"{int(seconds // DAY_SECONDS)} days"
