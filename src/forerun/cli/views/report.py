"""`forerun report`: the results and curves of a run."""

from __future__ import annotations

import argparse
import sys


def run(args: argparse.Namespace) -> int:
    from forerun.api.reporting import report_run
    from forerun.console import SafeConsole
    from forerun.report.terminal import PIPED_COLUMNS

    found = report_run(args.location)
    console = SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPED_COLUMNS)
    found.print(console)
    if args.html:
        found.save_html(args.html)
        print(f"\nreport: {args.html}")
    return 0
