"""`forerun doctor`: what is wrong with this machine, and how to mend it."""

from __future__ import annotations

import argparse


def run(args: argparse.Namespace) -> int:
    from forerun.doctor import report

    return report.run(smoke=args.smoke)
