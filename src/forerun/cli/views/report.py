"""`forerun report`: the results and curves of a run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.verbs.reports import RunComparison, RunReport


def run(args: argparse.Namespace) -> int:
    from forerun.verbs.reports import report_run

    show(report_run(args.location), "report", args.html)
    return 0


def show(found: RunReport | RunComparison, name: str, file: str | None) -> None:
    """Print a report or a comparison, as wide as the terminal, and write its page if `file` is given."""
    from forerun.console import SafeConsole
    from forerun.report.terminal import PIPED_COLUMNS

    found.print(SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPED_COLUMNS))
    if file:
        found.save_html(file)
        print(f"\n{name}: {file}")
