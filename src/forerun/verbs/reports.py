"""`report_run` and `compare_runs`: the records of runs as pages and tables."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.files import write_output
from forerun.pages.render import render
from forerun.report.comparison import Comparison, compare_records, comparison_page
from forerun.report.page import page
from forerun.report.run_facts import RunFacts, run_facts
from forerun.report.run_record import RunRecord, read_run
from forerun.report.terminal import PIPED_COLUMNS, print_comparison, print_report
from forerun.reporter import LineReporter
from forerun.verbs.table import Table

if TYPE_CHECKING:
    from rich.console import Console


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
        return page(self.record, self._facts)

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file. It loads nothing from the network."""
        write_output(Path(file), self.html(), fix="name another file with --html")

    def print(self, console: Console) -> None:
        """Print the report, as wide as the console."""
        print_report(console, self.record, self._facts)

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
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
        return comparison_page(self._comparison)

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file. It loads nothing from the network."""
        write_output(Path(file), self.html(), fix="name another file with --html")

    def print(self, console: Console) -> None:
        """Print the comparison, as wide as the console."""
        print_comparison(console, self._comparison)

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return render("report_frame.html.jinja", title="comparison of runs", content=self.html())


def report_run(location: str | os.PathLike[str]) -> RunReport:
    """Read a run, finished or not, and return its report.

    Args:
      location: the folder of a run, or the address of its checkpoints, such as `gs://bucket/checkpoints/NAME`. A bucket
        has the state of the newest checkpoint.

    Returns:
      The report.

    Raises:
      UserError: the location is not a run.
    """
    record = _read(location)
    return RunReport(record, run_facts(record))


def compare_runs(*locations: str | os.PathLike[str]) -> RunComparison:
    """Read several runs and compare their results, their curves and their jobs.

    Args:
      *locations: the folders of two runs or more, or the addresses of their checkpoints.

    Returns:
      The comparison.

    Raises:
      UserError: a location is not a run, or fewer than two are given.
    """
    return RunComparison(compare_records([_read(one) for one in locations]))


def _read(location: str | os.PathLike[str]) -> RunRecord:
    return read_run(os.fspath(location), LineReporter(sys.stderr))


def _text(shown: RunReport | RunComparison) -> str:
    from forerun.console import SafeConsole

    stream = io.StringIO()
    shown.print(SafeConsole(file=stream, width=PIPED_COLUMNS, force_terminal=False))
    return stream.getvalue().rstrip("\n")
