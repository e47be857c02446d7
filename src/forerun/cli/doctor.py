"""`forerun doctor`: find problems of this machine, and print how to fix them."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    from forerun.doctor import report

    return report.run(smoke=args.smoke, overrides=args.overrides)
