"""`forerun cache`: a teacher reads the job's data once, and students learn from what was written down."""

from __future__ import annotations

import argparse
import sys

from forerun.config.load import load
from forerun.models.plugin import use_job_folder
from forerun.units import Bytes, Seconds, Usd


def run(args: argparse.Namespace) -> int:
    loaded = load(args.job, args.overrides)
    use_job_folder(loaded.path.parent)
    if args.on:
        return _planned(args)
    from forerun.loop.cache import cache
    from forerun.supervise.chip import free_chip_for
    from forerun.track.display import make_display

    free_chip_for(loaded.job.device, print)
    with make_display(sys.stdout) as display:
        written = cache(loaded.job, display)
    layout = written.layout
    print(
        f"done: {layout.rows} rows, {Bytes(layout.total_bytes)} in {written.folder}; "
        f"{written.shards} of {layout.shards} shards were written now, in {written.seconds}"
    )
    return 0


def _planned(args: argparse.Namespace) -> int:
    """Size, time and price on slices that are not here: by the TPU compiler."""
    from forerun.loop.cache import described, layout_of, require_folder
    from forerun.loop.concrete import concrete
    from forerun.loop.corpus import model_vocab, open_corpus
    from forerun.models.registry import model_of
    from forerun.models.teacher import teacher_section
    from forerun.plan.answers import answers
    from forerun.plan.cache import cached_verdict
    from forerun.plan.money import Tariff
    from forerun.plan.progress import Progress
    from forerun.plan.question import slices_named
    from forerun.plan.recording import possible_slices, recording_bill, recording_question

    job = load(args.job, args.overrides).job
    slices, tariff = slices_named(args.on), Tariff(args.zone, args.prices)
    tariff.check()
    slices, impossible = possible_slices(job, slices)
    require_folder(job)
    corpus = open_corpus(job)
    job = concrete(job, corpus)
    vocab = model_vocab(job)
    assert vocab is not None, "the job is concrete"
    layout = layout_of(job, corpus, model_of(teacher_section(job)), vocab)
    print(f"cache: {described(layout)}")
    questions = [recording_question(job, one) for one in slices]
    with Progress(questions, plain_lines=True) as progress:
        verdicts = answers(questions, progress.phase, cached_verdict)
    for one in impossible:
        print(one.text)
    for verdict in verdicts:
        name, bill = verdict.question.slice.name, recording_bill(verdict, layout.rows, tariff)
        if idle := verdict.question.idle_text():
            print(idle)
        if bill is None:
            need, limit = verdict.memory.peak_bytes, verdict.limit_bytes
            print(f"{name}: does not fit, {Bytes(need)} of {Bytes(limit)} HBM; a smaller micro_batch may")
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
            f"{Bytes(verdict.memory.peak_bytes)} of {Bytes(verdict.limit_bytes)} HBM"
        )
    print(
        "before the first batch: start and compile as in forerun plan, and the teacher's files. Not counted: shards "
        "are written while the teacher goes on, so a slow disk costs time; on spot, a preemption and the wait after it"
    )
    return 0 if any(verdict.fits for verdict in verdicts) else 2
