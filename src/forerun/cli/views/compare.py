"""`forerun compare`: curves, results and differences of several runs."""

from __future__ import annotations

import argparse

from forerun.cli.views.report import show


def run(args: argparse.Namespace) -> int:
    from forerun.verbs.reports import compare_runs

    show(compare_runs(*args.locations), "comparison", args.html)
    return 0
