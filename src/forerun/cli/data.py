"""`forerun data`: show the data as the model will see it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.options.job_warnings import print_warnings
from forerun.cli.options.shard import shard_of
from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.resolve.resolved_job import ResolvedJob


def run(args: argparse.Namespace) -> int:
    """Print what the model will see, or tokenize, verify or compare the data."""
    from forerun.resolve.resolve_model import resolve_model

    job = _job(args)
    if args.html and not Path(args.html).absolute().parent.is_dir():
        raise UserError(
            "E-COMMAND-006",
            f"--html {args.html}: there is no such folder",
            why="the page is written there",
            fix="make the folder first",
        )
    resolved = resolve_model(job)
    print_warnings(resolved)
    if args.shard or args.ray:
        return _tokenize(job, shard_of(args.shard or "0/1", os.environ), args.ray)
    if args.verify:
        return _verify(job)
    if args.ledger:
        return _compare(job, args.ledger)
    return _show(args, resolved)


def _job(args: argparse.Namespace) -> Job:
    if args.stage is None:
        from forerun.verbs.job_files import load_job

        return load_job(args.job, *args.overrides)
    from forerun.cli.options.stage_choice import planned_jobs

    return planned_jobs(args)[0]


def _show(args: argparse.Namespace, resolved: ResolvedJob) -> int:
    from forerun.console import SafeConsole
    from forerun.data.reads.cache_size import bucket_cache
    from forerun.units import Bytes
    from forerun.verbs.data import PIPED_COLUMNS, inspect_data

    report = inspect_data(resolved.job, samples=args.samples)
    for text in report.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print(f"model: {resolved.starting_weights}")
    report.print(SafeConsole(width=None if sys.stdout.isatty() else PIPED_COLUMNS), full=args.full)
    if (cache := bucket_cache(resolved.job.data)) is not None:
        print(f"local cache: {Bytes(cache.limit_bytes)}, {cache.reason}")
    if args.html:
        report.save_html(args.html)
        print(f"page: {args.html}")
    return 0


def _tokenize(job: Job, shard: tuple[int, int], ray: str | None) -> int:
    from forerun.verbs.data import tokenize_data

    share = "the data" if shard == (0, 1) else f"shard {shard[0]}/{shard[1]}"
    for name, (folder, is_complete) in tokenize_data(job, shard=shard, ray=ray).items():
        state = "all units are complete" if is_complete else "other shards are still missing"
        print(f"{name}: {share} is in {folder}; {state}")
    return 0


def _verify(job: Job) -> int:
    from forerun.units import Count
    from forerun.verbs.data import verify_data

    for name, part in verify_data(job).items():
        print(f"{name}: {Count(part.tokens)} tokens are as they were written, {part.folder}")
    return 0


def _compare(job: Job, ledger: str) -> int:
    from forerun.verbs.data import compare_ledger

    found = compare_ledger(job, ledger)
    skipped = f"; {found.skipped} of these steps were skipped by the guard" if found.skipped else ""
    print(f"{ledger}: {found.steps} steps and {found.examples} examples, all as the job says{skipped}")
    return 0
