"""`forerun hardware`: the sourced tables of chips, slices and prices."""

from __future__ import annotations

import argparse

from forerun.errors import UserError, did_you_mean

TABLES = ("chips", "slices", "prices")


def run(args: argparse.Namespace) -> int:
    if args.table is not None and args.table not in TABLES:
        near = did_you_mean(args.table, TABLES)
        fix = f"did you mean '{near}'?" if near else "see: forerun hardware --help"
        raise UserError(f"there is no table '{args.table}'", why=f"tables: {', '.join(TABLES)}", fix=fix)
    from forerun.hardware import show

    texts = {
        "chips": show.chips_table,
        "slices": show.slices_table,
        "prices": lambda: show.prices_table(args.prices, args.zone),
    }
    print("\n\n".join(texts[table]() for table in ((args.table,) if args.table else TABLES)))
    return 0
