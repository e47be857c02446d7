"""`forerun hardware`: the sourced tables of chips, slices and prices."""

from __future__ import annotations

import argparse

from forerun.verbs.machine import TABLES, hardware_table


def run(args: argparse.Namespace) -> int:
    """Print one table, or all of them."""
    tables = (args.table,) if args.table else TABLES
    options = {"prices": args.prices, "zone": args.zone, "provider": args.provider}
    print("\n\n".join(hardware_table(table, **options) for table in tables))
    return 0
