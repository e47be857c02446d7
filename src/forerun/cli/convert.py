"""`forerun convert`: a job from a configuration of axolotl, TRL or the transformers Trainer."""

from __future__ import annotations

import argparse
import sys

from forerun.verbs.job_files import convert


def run(args: argparse.Namespace) -> int:
    """Print the job on stdout, and what the user must know on stderr."""
    found = convert(args.file, devices=args.devices, model=args.model, data=args.data)
    sys.stdout.write(found.text)
    for assumed in found.assumed:
        print(f"assumed: {assumed}", file=sys.stderr)
    for key, reason in found.not_converted.items():
        print(f"not converted: {key}: {reason}", file=sys.stderr)
    print(
        f"converted from {found.source}; {len(found.not_converted)} keys not converted, {len(found.unneeded)} not "
        "needed (listed at the end of the job)",
        file=sys.stderr,
    )
    return 0
