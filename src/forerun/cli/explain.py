"""`forerun explain`: what an error code means, why it is raised, and the fix, without a network."""

from __future__ import annotations

import argparse

from forerun.error_catalog import codes, what_of
from forerun.verbs.machine import explain


def run(args: argparse.Namespace) -> int:
    """Print the texts of a code, or all codes with the first line of each error."""
    if args.code is not None:
        print(explain(args.code))
        return 0
    for code in codes():
        print(f"{code:<18}{what_of(code).splitlines()[0]}", flush=True)  # reading all files takes about 1.5 s
    return 0
