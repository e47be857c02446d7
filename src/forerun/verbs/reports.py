"""`report_run`, `compare_runs` and `runs`: the records of runs as pages and tables."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forerun.files import write_output
from forerun.reporter import LineReporter
from forerun.verbs.option_types import Value
from forerun.verbs.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.report.comparison import Comparison
    from forerun.report.run_facts import RunFacts
    from forerun.report.run_record import RunRecord
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


@dataclass(frozen=True)
class RunReport:
    """The report of a run. Printing it shows the report of `forerun report`; a notebook shows the page.

    Attributes:
      record: what the run has recorded: `job`, `metrics`, `events`, `skips`, `summary`, `exports`.
    """

    record: RunRecord
    _facts: RunFacts = field(repr=False)

    @property
    def status(self) -> str:
        """The state: finished, running, waiting, silent, stopped, interrupted or not started."""
        return str(self._facts.status.state)

    def html(self) -> str:
        """Return the complete page that `forerun report --html` writes."""
        from forerun.report.page import page

        return page(self.record, self._facts)

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file. It loads nothing from the network."""
        write_output(Path(file), self.html(), fix="name another file with --html")

    def print(self, console: Console) -> None:
        """Print the report, as wide as the console."""
        from forerun.report.terminal import print_report

        print_report(console, self.record, self._facts)

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        from forerun.pages.render import render

        return render("report_frame.html.jinja", title=f"run {self.record.name}", content=self.html())


@dataclass(frozen=True)
class RunComparison:
    """The comparison of runs. Printing it shows the tables of `forerun compare`; a notebook shows the page."""

    _comparison: Comparison = field(repr=False)

    @property
    def records(self) -> tuple[RunRecord, ...]:
        """What each run has recorded, in the order of the call."""
        return self._comparison.records

    @property
    def table(self) -> Table:
        """The results of the runs as texts: losses, throughput, time and cost."""
        return Table(self._comparison.rows)

    @property
    def differences(self) -> dict[str, list[str]]:
        """The values of the jobs that differ: the value of each run, by key."""
        return dict(self._comparison.differences)

    def html(self) -> str:
        """Return the complete page that `forerun compare --html` writes."""
        from forerun.report.comparison import comparison_page

        return comparison_page(self._comparison)

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file. It loads nothing from the network."""
        write_output(Path(file), self.html(), fix="name another file with --html")

    def print(self, console: Console) -> None:
        """Print the comparison, as wide as the console."""
        from forerun.report.terminal import print_comparison

        print_comparison(console, self._comparison)

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        from forerun.pages.render import render

        return render("report_frame.html.jinja", title="comparison of runs", content=self.html())


def report_run(location: Annotated[str | os.PathLike[str], Value("LOCATION")]) -> RunReport:
    """Read a run, finished or not, and return its report.

    Args:
      location: folder of the run, or address of its checkpoints in a bucket, such as gs://bucket/checkpoints/NAME,
        which has the state of the newest checkpoint

    Returns:
      The report.

    Raises:
      UserError: the location is not a run.
    """
    from forerun.report.run_facts import run_facts

    record = _read(location)
    return RunReport(record, run_facts(record))


def compare_runs(*locations: str | os.PathLike[str]) -> RunComparison:
    """Read several runs and compare their results, their curves and their jobs.

    Args:
      *locations: folders of two runs or more, or addresses of their checkpoints

    Returns:
      The comparison.

    Raises:
      UserError: a location is not a run, or fewer than two are given.
    """
    from forerun.report.comparison import compare_records

    return RunComparison(compare_records([_read(one) for one in locations]))


def _read(location: str | os.PathLike[str]) -> RunRecord:
    from forerun.report.run_record import read_run

    return read_run(os.fspath(location), LineReporter(sys.stderr))


def _text(shown: RunReport | RunComparison) -> str:
    from forerun.console import SafeConsole
    from forerun.report.terminal import PIPED_COLUMNS

    stream = io.StringIO()
    shown.print(SafeConsole(file=stream, width=PIPED_COLUMNS, force_terminal=False))
    return stream.getvalue().rstrip("\n")


def runs(
    folder: Annotated[str | os.PathLike[str], Value("LOCATION", is_positional=True)] = "runs",
) -> tuple[RunEntry, ...]:
    """List the runs of a folder with their state and newest values, those with the newest news first.

    A run that cannot be read has the state `broken` and the reason in `detail`. Nothing is changed.
    `fr.Table(dataclasses.asdict(run) for run in fr.runs())` is a table of the list.

    Args:
      folder: folder of runs, or of checkpoints in a bucket

    Raises:
      UserError: The folder does not exist.
    """
    from forerun.watch.run_list import list_runs

    return list_runs(os.fspath(folder))


def print_runs(entries: tuple[RunEntry, ...]) -> None:
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
