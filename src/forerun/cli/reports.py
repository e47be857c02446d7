"""`forerun report`, `forerun compare` and `forerun runs`: show runs, and change nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.arguments import options_of
from forerun.verbs.option_types import File, Value

if TYPE_CHECKING:
    from forerun.verbs.reports import RunComparison, RunReport


@options_of("forerun.verbs.reports:report_run")
def report(*, html: File | None = None, **options: Any) -> int:
    """Print the report of a run.

    Args:
      html: also write the report as a page with charts
    """
    from forerun.verbs.reports import report_run

    return _show(report_run(**options), "report", html)


@options_of("forerun.verbs.reports:compare_runs")
def compare(locations: Annotated[Sequence[str], Value("LOCATION")], *, html: File | None = None) -> int:
    """Print the comparison of runs.

    Args:
      html: also write the comparison as a page with charts
    """
    from forerun.verbs.reports import compare_runs

    return _show(compare_runs(*locations), "comparison", html)


@options_of("forerun.verbs.reports:runs")
def runs(*, json: bool = False, **options: Any) -> int:
    """List the runs of a folder.

    Args:
      json: print the list as JSON
    """
    from forerun.verbs.reports import print_runs
    from forerun.verbs.reports import runs as list_runs

    entries = list_runs(**options)
    if json:
        from json import dumps

        print(dumps([asdict(entry) for entry in entries], indent=2))
    elif entries:
        print_runs(entries)
    else:
        print(f"{options.get('folder', 'runs')} has no runs")
    return 0


def _show(found: RunReport | RunComparison, name: str, file: File | None) -> int:
    """Print a report or a comparison, as wide as the terminal, and write its page if `file` is given."""
    from forerun.console import SafeConsole
    from forerun.report.terminal import PIPED_COLUMNS

    found.print(SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPED_COLUMNS))
    if file:
        found.save_html(file)
        print(f"\n{name}: {file}")
    return 0
