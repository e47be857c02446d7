"""`forerun ps`: list the cloud resources that cost money."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forerun.cli.cloud.connection import providers_of
from forerun.reporter import LineReporter
from forerun.verbs.option_types import Project

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.cloud.record.read_entry import DamagedEntry
    from forerun.cloud.view.project_state import ProjectState
    from forerun.cloud.view.run_rows import CloudRow

TITLES = ("run", "slice", "zone", "state", "step", "cost", "cap", "left")
WIDE_COLUMNS = 100
LEAST_NAME_COLUMNS = 8
STYLES = {
    "training": "green",
    "exporting": "green",
    "finished": "cyan",
    "waiting": "yellow",
    "creating": "yellow",
    "installing": "yellow",
    "checking": "yellow",
    "starting": "yellow",
    "no report": "bold red",
    "damaged record": "bold red",
    "broken": "bold red",
    "failed": "bold red",
    "preempted": "red",
    "preempting": "red",
}


def ps(*, project: Project | None = None, all: bool = False, json: bool = False) -> int:
    """List the cloud resources that cost money.

    Args:
      all: also show resources that cost nothing, and ended runs
      json: print the list as JSON
    """
    from forerun.cloud.view.project_state import read_project
    from forerun.cloud.view.run_location import known_runs, remember_runs
    from forerun.cloud.view.run_rows import rows_of

    state = read_project(lambda: providers_of(project), known_runs(), time.time())
    remember_runs(state.snapshots)
    rows = rows_of(state.resources, state.snapshots, state.now)
    if not all:
        rows = tuple(row for row in rows if row.costs_money or row.kind == "slice")
    if json:
        print(dumps(_values(rows, state, all_runs=all), indent=2))
    else:
        _print(rows, state, all_runs=all)
    for error in state.errors[1:]:
        LineReporter(sys.stderr).warn(f"{error.what} [{error.code}]")
    if state.errors:
        raise state.errors[0]  # the list above is incomplete
    return 0


def _values(rows: tuple[CloudRow, ...], project: ProjectState, *, all_runs: bool) -> dict[str, object]:
    from forerun.cloud.view.run_rows import runs_without_resources, state_of_run

    others = runs_without_resources(rows, project.snapshots, ended=all_runs)
    return {
        "now": project.now,
        "resources": [asdict(row) for row in rows],
        "runs": [
            {
                "run": one.run.name,
                "folder": one.run.folder,
                "state": state_of_run(one, project.now),
                "step": one.step,
                "usd": one.usd(project.now),
                "max_usd": one.run.max_usd,
            }
            for one in others
        ],
        "damaged": [asdict(entry) for entry in _damaged(project)],
        "unread": {folder: str(why) for folder, why in project.unread.items()},
        "errors": [f"{error.what} [{error.code}]" for error in project.errors],
    }


def _print(rows: tuple[CloudRow, ...], project: ProjectState, *, all_runs: bool) -> None:
    from rich.text import Text

    from forerun.cloud.view.run_rows import runs_without_resources, state_of_run
    from forerun.console import SafeConsole
    from forerun.safe_text import clean

    console = SafeConsole()
    if rows:
        console.print(table(rows, project.now, console.width))
        console.print(Text(_total(rows), style="dim"))
    elif not project.errors:
        console.print("nothing of forerun exists in this project, and nothing costs money")
    for one in runs_without_resources(rows, project.snapshots, ended=all_runs):
        cost, step = f"${one.usd(project.now):.2f}", "" if one.step is None else f" at step {one.step}"
        console.print(Text(clean(f"{one.run.name}: {state_of_run(one, project.now)}{step}; cost {cost}")))
    for entry in _damaged(project):
        console.print(Text(clean(str(entry)), style="red"))
    for folder, why in project.unread.items():
        if isinstance(why, str):
            console.print(Text(clean(f"{folder} cannot be read: {why}"), style="red"))


def _damaged(project: ProjectState) -> list[DamagedEntry]:
    """Return the damaged files of all records."""
    from forerun.cloud.record.read_entry import DamagedEntry

    entries = [entry for snapshot in project.snapshots.values() for entry in snapshot.damaged]
    return entries + [why for why in project.unread.values() if isinstance(why, DamagedEntry)]


def table(rows: tuple[CloudRow, ...], now: float, width: int) -> Table:
    """Return the table of the resources. On a narrow terminal, names of runs are shortened, and totals omitted."""
    from rich.table import Table
    from rich.text import Text

    from forerun.safe_text import clean

    cells = [_cells(row, now, totals=width >= WIDE_COLUMNS) for row in rows]
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    widths = [max(len(title), *(len(clean(one[place])) for one in cells)) for place, title in enumerate(TITLES)]
    others = sum(widths[1:]) + 2 * len(TITLES)
    widths[0] = min(widths[0], max(LEAST_NAME_COLUMNS, width - others))
    for title, widest in zip(TITLES, widths, strict=True):
        right = title in ("step", "cost", "cap", "left")
        justify: Literal["left", "right"] = "right" if right else "left"
        found.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", width=widest)
    for one in cells:
        texts = [Text(clean(cell)) for cell in one]
        texts[TITLES.index("state")].stylize(STYLES.get(one[TITLES.index("state")], ""))
        found.add_row(*texts)
    return found


def _cells(row: CloudRow, now: float, *, totals: bool) -> tuple[str, ...]:
    steps = f"/{row.total_steps}" if row.total_steps and totals else ""
    capacity = f" {row.capacity}" if row.capacity not in ("", "on-demand") else ""
    return (
        row.run,
        f"{row.slice}{capacity}" if row.kind == "slice" else row.kind,
        Path(row.zone).name,  # of existing machines: the file that lists them
        row.state,
        "" if row.step is None else f"{row.step}{steps}",
        "?" if row.usd is None else f"${row.usd:.2f}",
        "" if row.max_usd is None else f"${row.max_usd:g}",
        "" if row.deadline is None else time_left(row.deadline - now),
    )


def time_left(seconds: float) -> str:
    """Return the time until a deadline, as briefly as a column needs it."""
    if seconds <= 0:
        return "now"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min" if minutes else "< 1 min"
    return f"{minutes // 60} h {minutes % 60:02d}" if minutes < 48 * 60 else f"{minutes // 1440} days"


def _total(rows: tuple[CloudRow, ...]) -> str:
    billed = [row for row in rows if row.is_billed]
    if not billed:
        return "nothing is billed at present"
    known = sum(row.usd_per_hour or 0.0 for row in billed)
    unknown = "" if all(row.usd_per_hour is not None for row in billed) else ", without resources of unknown price"
    return f"billed at present: ${known:.2f} per hour{unknown}"
