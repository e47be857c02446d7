"""`forerun data`: show the data as the model will see it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.cli.arguments import options_of
from forerun.cli.shard import shard_of
from forerun.cli.stage_choice import planned_jobs, print_warnings
from forerun.errors import UserError
from forerun.verbs.option_types import File, JobFile, Name, Override, Value

if TYPE_CHECKING:
    from forerun.config.schema import Job


@options_of("forerun.verbs.data:inspect_data")
def data(
    job: JobFile,
    *overrides: Override,
    stage: Name | None = None,
    full: bool = False,
    html: File | None = None,
    shard: Annotated[str, Value("I/N", without_value="auto")] | None = None,
    ray: Annotated[str, Value("ADDRESS")] | None = None,
    verify: bool = False,
    ledger: File | None = None,
    **options: Any,
) -> int:
    """Print what the model will see, or tokenize, verify or compare the data.

    Args:
      stage: with stages: the stage whose data is shown
      full: show long rows completely
      html: write a page with charts to this file
      shard: only tokenize share I of N, to divide the work among machines; auto, or no value: the share of this task of
        a Slurm array or a Kubernetes indexed job
      ray: only tokenize, on a Ray cluster: auto for the cluster of this machine, or HOST:PORT of its head node
      verify: compare all tokens with their checksums
      ledger: compare the ledger.jsonl of a run with the order of this job
    """
    from forerun.resolve.resolve_model import resolve_model
    from forerun.verbs.data import compare_ledger, verify_data
    from forerun.verbs.job_files import load_job

    chosen = load_job(job, *overrides) if stage is None else planned_jobs(job, overrides, stage)[0]
    if html and not Path(html).absolute().parent.is_dir():
        raise UserError(
            "E-COMMAND-006",
            f"--html {html}: there is no such folder",
            why="the page is written there",
            fix="make the folder first",
        )
    resolved = resolve_model(chosen)
    print_warnings(resolved)
    if shard or ray:
        _tokenize(chosen, shard_of(shard or "0/1", os.environ), ray)
    elif verify:
        for name, part in verify_data(chosen).items():
            print(f"{name}: {part}")
    elif ledger:
        print(f"{ledger}: {compare_ledger(chosen, ledger)}")
    else:
        _show(resolved.job, resolved.starting_weights, full, html, options)
    return 0


def _show(job: Job, weights: str, full: bool, html: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
    from forerun.console import SafeConsole
    from forerun.data.reads.cache_size import bucket_cache
    from forerun.units import Bytes
    from forerun.verbs.data import PIPED_COLUMNS, inspect_data

    report = inspect_data(job, **options)
    for text in report.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print(f"model: {weights}")
    report.print(SafeConsole(width=None if sys.stdout.isatty() else PIPED_COLUMNS), full=full)
    if (cache := bucket_cache(job.data)) is not None:
        print(f"local cache: {Bytes(cache.limit_bytes)}, {cache.reason}")
    if html:
        report.save_html(html)
        print(f"page: {html}")


def _tokenize(job: Job, shard: tuple[int, int], ray: str | None) -> None:
    from forerun.verbs.data import tokenize_data

    share = "the data" if shard == (0, 1) else f"shard {shard[0]}/{shard[1]}"
    for name, (folder, is_complete) in tokenize_data(job, shard=shard, ray=ray).items():
        state = "all units are complete" if is_complete else "other shards are still missing"
        print(f"{name}: {share} is in {folder}; {state}")
