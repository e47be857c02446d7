"""Options of commands that read the records of runs."""

from __future__ import annotations

import argparse


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun report`."""
    parser.add_argument(
        "location", metavar="LOCATION", help="folder of the run, or address of its checkpoints in a bucket"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as a page with charts")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `forerun compare`."""
    parser.add_argument(
        "locations",
        metavar="LOCATION",
        nargs="+",
        help="folders of two runs or more, or addresses of their checkpoints",
    )
    parser.add_argument("--html", metavar="FILE", help="also write the comparison as a page with charts")
