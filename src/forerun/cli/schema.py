"""`forerun schema`: the JSON Schema of a job file, for editors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from forerun.files import write_output


def run(args: argparse.Namespace) -> int:
    from forerun.verbs.job_files import job_schema

    text = json.dumps(job_schema(), indent=2)
    if args.output is None:
        print(text)
        return 0
    write_output(Path(args.output), text + "\n", fix="name another file with --output")
    print(f"wrote {args.output}; the first line of a job file makes editors use it:")
    print(f"# yaml-language-server: $schema={args.output}")
    return 0
