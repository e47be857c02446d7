"""`forerun compare`: curves, results and differences of several runs."""

from __future__ import annotations

import argparse
import sys


def run(args: argparse.Namespace) -> int:
    from forerun.api.reporting import compare_runs
    from forerun.console import SafeConsole
    from forerun.report.terminal import PIPED_COLUMNS

    found = compare_runs(*args.locations)
    console = SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPED_COLUMNS)
    found.print(console)
    if args.html:
        found.save_html(args.html)
        print(f"\ncomparison: {args.html}")
    return 0
