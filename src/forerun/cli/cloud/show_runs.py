"""`forerun ps`, `logs` and `fetch`: show cloud runs, and download their results."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from forerun.cli.arguments import options_of
from forerun.cli.cloud.connection import files_of, providers_of
from forerun.reporter import LineReporter
from forerun.safe_text import raw_stream
from forerun.verbs.option_types import Count, Folder, Project, Value, host_index

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.cloud.record.host_log import LogReader
    from forerun.cloud.record.read_entry import DamagedEntry
    from forerun.cloud.record.run_files import RunFiles
    from forerun.cloud.view.download import ResultFile
    from forerun.cloud.view.project_state import ProjectState
    from forerun.cloud.view.run_rows import CloudRow
    from forerun.cloud.view.snapshot import RecordSnapshot

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


# ---- forerun logs ----


POLL_SECONDS = 2.0
STATE_SECONDS = 10.0  # between two reads of the record: whether the run has a new attempt, or has ended
LONGEST_PAUSE_SECONDS = 30.0
# A controller renews its lease within a minute. A run without a slice and without a controller has no further log.
LEASE_SECONDS = 120.0


@options_of("forerun.verbs.cloud_runs:fetch_run", omit=("to",))
def logs(
    name: str,
    *,
    host: Annotated[int, Value("N", host_index)] = 0,
    attempt: Count | None = None,
    no_follow: bool = False,
    project: Project | None = None,
) -> int:
    """Print the log of a host, and follow it until the run ends.

    Args:
      host: index of the host
      attempt: number of the attempt (default: the newest)
      no_follow: print the log up to now, and end
    """
    files = files_of(name, project)
    snapshot = _snapshot(files)
    newest = snapshot.newest
    chosen = attempt or (newest.number if newest else None)
    if chosen is None and no_follow:
        LineReporter(sys.stderr).info("the run has no slice yet")
        return 0
    _require(snapshot, chosen, host)
    if no_follow:
        assert chosen is not None
        print_new(_open_log(files, snapshot, chosen, host))
        return 0
    _follow(files, snapshot, chosen, host, only=attempt is not None)
    return 0


def _follow(files: RunFiles, snapshot: RecordSnapshot, attempt: int | None, host: int, *, only: bool) -> None:
    """Print the log of an attempt and of those that follow it, until the run ends; with `only`, of one attempt."""
    reader = None
    lease, renewed = snapshot.lease, time.monotonic()
    while True:
        if reader is None and attempt is not None:
            reader = _open_log(files, snapshot, attempt, host)
        if snapshot.lease != lease or snapshot.open_attempts:
            lease, renewed = snapshot.lease, time.monotonic()
        is_abandoned = time.monotonic() - renewed > LEASE_SECONDS
        is_over = attempt in snapshot.ends if only else snapshot.is_over or is_abandoned
        if reader is not None:
            print_new(reader)
        newest = snapshot.newest
        if not only and newest is not None and newest.number != attempt:
            attempt, reader = newest.number, None
            continue
        if is_over:
            LineReporter(sys.stderr).info(_end_text(snapshot))
            return
        snapshot = _print_until_next_state(files, reader)


def _print_until_next_state(files: RunFiles, reader: LogReader | None) -> RecordSnapshot:
    """Print what is added, then return the new state of the run. Outages only delay it, such as those of a laptop."""
    from forerun.errors import StorageError

    until, pause = time.monotonic() + STATE_SECONDS, POLL_SECONDS
    while True:
        time.sleep(pause)
        try:
            if reader is not None:
                print_new(reader)
            if time.monotonic() >= until:
                return _snapshot(files)
            pause = POLL_SECONDS
        except BrokenPipeError:
            raise
        except (StorageError, OSError) as error:
            if pause == POLL_SECONDS:
                LineReporter(sys.stderr).info(f"the bucket does not answer; trying again: {error}")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def print_new(reader: LogReader) -> None:
    """Print what was added to a log. It is the output of the hosts, without control sequences."""
    if content := reader.read():
        print(content.decode("utf-8", "replace"), end="", flush=True)


def _open_log(files: RunFiles, snapshot: RecordSnapshot, attempt: int, host: int) -> LogReader:
    from forerun.cloud.record.host_log import LogReader

    option = snapshot.attempts[attempt].option
    LineReporter(sys.stderr).info(
        f"--- attempt {attempt}: {option.slice} in {option.zone} ({option.capacity}), host {host}"
    )
    return LogReader(files, attempt, host)


def _snapshot(files: RunFiles) -> RecordSnapshot:
    from forerun.cloud.record.read_entry import require_undamaged
    from forerun.cloud.view.snapshot import read_snapshot
    from forerun.errors import UserError

    found = read_snapshot(files)
    if found is None:
        raise UserError(
            "E-CLOUD-075",
            f"the record of the run in {files.address} was removed",
            why="cloud/run.json does not exist any more",
            fix="see what exists with forerun ps",
        )
    return require_undamaged(found)


def _require(snapshot: RecordSnapshot, attempt: int | None, host: int) -> None:
    from forerun.errors import UserError

    if attempt is None:
        return
    entry = snapshot.attempts.get(attempt)
    if entry is None:
        raise UserError(
            "E-CLOUD-076",
            f"the run {snapshot.run.name} has no attempt {attempt}",
            why=f"it has {len(snapshot.attempts)} attempts",
            fix="omit --attempt for the newest one",
        )
    if host >= entry.option.hosts:
        raise UserError(
            "E-CLOUD-077",
            f"the slice {entry.option.slice} of the run {snapshot.run.name} has no host {host}",
            why=f"it has {entry.option.hosts} hosts; the first has the index 0",
            fix=f"choose one of them, for example --host {entry.option.hosts - 1}",
        )


def _end_text(snapshot: RecordSnapshot) -> str:
    if snapshot.finished is not None:
        return f"--- the run has finished; forerun fetch {snapshot.run.name} downloads its results"
    if snapshot.ends:
        end = snapshot.ends[max(snapshot.ends)]
        return f"--- the slice is deleted: {end.reason}{f' ({end.detail})' if end.detail else ''}"
    return "--- the run has no slice and no controller"


# ---- forerun fetch ----


LINE_COLUMNS = 79


@options_of("forerun.verbs.cloud_runs:fetch_run")
def fetch(name: str, *, to: Folder | None = None, project: Project | None = None) -> int:
    """Download the results of a cloud run, and compare their checksums."""
    from forerun.cloud.record.run_files import EXPORT_FOLDER
    from forerun.cloud.view.download import fetch_results
    from forerun.units import Bytes

    result = fetch_results(files_of(name, project), Path(to) if to else None, _tell)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=raw_stream(sys.stderr), flush=True)
    files = (*result.downloaded, *result.present)
    print(f"{result.folder}: {len(files)} files, {Bytes(result.size_bytes)}, checksums verified")
    if result.present:
        print(f"  {len(result.present)} of them were complete before")
    if any(one.name.startswith(f"{EXPORT_FOLDER}/") for one in files):
        print(f"  try the model: forerun generate {result.folder / EXPORT_FOLDER} Once")
    return 0


def _tell(file: ResultFile, received_bytes: int) -> None:
    from forerun.safe_text import clean
    from forerun.units import Bytes

    if sys.stderr.isatty():
        text = clean(f"{file.path.name}: {Bytes(received_bytes)} of {Bytes(file.size_bytes)}")
        print(f"\r\x1b[K{text[:LINE_COLUMNS]}", end="", file=raw_stream(sys.stderr), flush=True)
