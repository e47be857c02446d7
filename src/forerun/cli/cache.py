"""`forerun cache`: store the logits of a teacher once, so that students can learn from them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from forerun.exit_codes import USER_MISTAKE
from forerun.units import Bytes, Seconds, Usd

if TYPE_CHECKING:
    from forerun.config.schema import Job


def run(args: argparse.Namespace) -> int:
    """Compute the cache of a teacher, or print its size, time and price on slices."""
    if args.on:
        return _planned(args)
    from forerun.verbs.export.export import cache_teacher

    for job in _jobs(args):
        written = cache_teacher(job)
        layout = written.layout
        print(
            f"done: {layout.rows} rows, {Bytes(layout.total_bytes)} in {written.folder}; "
            f"{written.shards} of {layout.shards} shards were written now, in {written.seconds}"
        )
    return 0


def _jobs(args: argparse.Namespace) -> list[Job]:
    """Return the job of the file, or those of its stages. Without --stage, stages without a cache are omitted."""
    from forerun.cli.options.stage_choice import planned_jobs

    jobs = planned_jobs(args)
    with_cache = [job for job in jobs if job.method.teacher is not None and not job.method.runs_teacher]
    return with_cache if len(jobs) > 1 and with_cache else jobs


def _planned(args: argparse.Namespace) -> int:
    """Print size, time and price on slices or GPU machines, by their compilers. No device is needed."""
    return max([_plan(args, job) for job in _jobs(args)])


def _plan(args: argparse.Namespace, job: Job) -> int:
    from forerun.verbs.export.export import plan_teacher_cache

    plan = plan_teacher_cache(job, on=args.on, zone=args.zone, provider=args.provider, prices=args.prices)
    print(f"cache: {plan.description}")
    for one in plan.impossible:
        print(one.text)
    for verdict, bill in plan.results:
        name = verdict.question.slice.name
        if idle := verdict.question.idle_text():
            print(idle)
        if bill is None:
            need, limit = verdict.memory.peak_bytes, verdict.limit_bytes
            print(f"{name}: does not fit, {Bytes(need)} of {Bytes(limit)} memory; a smaller micro_batch may")
            continue
        hours = [Seconds(3600 * one) for one in (bill.hours.low, bill.hours.mid, bill.hours.high)]
        paid = [
            f"{Usd(offer.usd.mid)} {way}"
            for way, offer in (("on demand", bill.on_demand), ("on spot", bill.spot))
            if offer
        ]
        print(
            f"{name}: {hours[1]} ({hours[0]} to {hours[2]}), {bill.begin_seconds} of it before the first batch, "
            f"{' or '.join(paid) or 'no price is known'}; "
            f"{bill.batches} batches of {verdict.question.job.batch} rows, "
            f"{Bytes(verdict.memory.peak_bytes)} of {Bytes(verdict.limit_bytes)} memory"
        )
    print(
        "before the first batch: start and compile as in forerun plan, and the teacher's files. Not counted: shards "
        "are written while the teacher runs, so a slow disk costs time; on spot, a preemption and the wait after it"
    )
    return 0 if plan.fits else USER_MISTAKE
