"""`forerun plan`: does the job fit these slices? Asked of the TPU compiler, on a machine without a TPU."""

from __future__ import annotations

import argparse
import sys

from forerun.config.load import load
from forerun.errors import UserError

PIPED_COLUMNS = 120


def run(args: argparse.Namespace) -> int:
    loaded = load(args.job, args.overrides)
    if not args.on:
        raise UserError(
            "no slice was named",
            why="plan compiles the job for the slices after --on",
            fix=f"forerun plan {args.job} --on v6e-1,v5e-8,v5p-8",
        )
    from forerun.plan.question import questions_of, slices_named

    slices = slices_named(args.on)
    sys.path.append(str(loaded.path.resolve().parent))  # a model of the user's own stands beside the job
    from forerun.loop.concrete import concrete
    from forerun.plan.answers import answers
    from forerun.plan.progress import Progress
    from forerun.plan.report import as_json, does_not_fit, print_table

    job = concrete(loaded.job)
    questions = questions_of(job, slices)
    with Progress(questions, plain_lines=not args.json) as progress:
        verdicts = answers(questions, progress.phase)
    if args.json:
        import json

        print(json.dumps(as_json(verdicts), indent=2))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS, highlight=False)
        model = job.model.name or "free dimensions"
        print_table(
            console, verdicts, f"{job.name}: {model}, batch {job.batch} x {job.sequence}, remat {job.remat.policy}"
        )
    sys.stdout.flush()
    if not any(v.fits for v in verdicts):
        raise does_not_fit(verdicts)
    return 0
