"""`forerun data`: what the model will see, before it sees it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cli.job_warnings import print_warnings
from forerun.config.load import load
from forerun.errors import UserError
from forerun.files import write_output
from forerun.models.plugin import use_job_folder

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.data.corpus import Corpus, OnProgress

PIPED_COLUMNS = 100


def run(args: argparse.Namespace) -> int:
    loaded = load(args.job, args.overrides)
    use_job_folder(loaded.path.parent)
    job: Job = loaded.job
    if args.html and not Path(args.html).absolute().parent.is_dir():
        raise UserError(
            f"--html {args.html}: there is no such folder", why="the page is written there", fix="make the folder first"
        )
    print_warnings(job)
    if args.shard:
        return _build_shard(job, _shard(args.shard))
    corpus = _opened(job)
    if args.verify:
        return _verify(corpus)
    for text in corpus.warnings:
        print(f"warning: {text}", file=sys.stderr)
    if args.ledger:
        return _compare(job, corpus, Path(args.ledger))
    return _show(args, job, corpus)


def _opened(job: Job) -> Corpus:
    from forerun.loop.corpus import open_corpus

    with _progress() as progress:
        return open_corpus(job, progress)


def _show(args: argparse.Namespace, job: Job, corpus: Corpus) -> int:
    from forerun.console import SafeConsole
    from forerun.data.view.opened import look_of
    from forerun.data.view.page import page
    from forerun.data.view.terminal import print_look
    from forerun.loop.starting_weights import starting_weights

    print(f"model: {starting_weights(job)}")
    look = look_of(job, corpus, samples=args.samples)
    width = None if sys.stdout.isatty() else PIPED_COLUMNS
    print_look(SafeConsole(width=width), look, full=args.full)
    if args.html:
        write_output(Path(args.html), page(look), fix="name another file with --html")
        print(f"page: {args.html}")
    return 0


def _build_shard(job: Job, shard: tuple[int, int]) -> int:
    """Tokenizes one share of the units. Whoever finishes last writes the index."""
    from forerun.data.corpus import recipe_of, tokenize
    from forerun.data.source.sources import open_source
    from forerun.data.tokens.build import is_whole
    from forerun.loop.corpus import dialect_of, model_vocab
    from forerun.loop.starting_weights import require_chosen_tokenizer

    require_chosen_tokenizer(job)
    dialect, vocab = dialect_of(job), model_vocab(job)
    for name, part in job.data.parts.items():
        source = open_source(part)
        with _progress() as progress:
            folder = tokenize(
                source,
                recipe_of(source, job.data, dialect, vocab, pairs=job.preferences is not None),
                job.data,
                shard=shard,
                on_progress=partial(progress, name),
            )
        state = "all units are there" if is_whole(folder) else "other shards are still missing"
        print(f"{name}: shard {shard[0]}/{shard[1]} is in {folder}; {state}")
    return 0


def _verify(corpus: Corpus) -> int:
    """Compare all files with their checksums, and add checksums of blocks to what was written without."""
    from forerun.data.tokens.store import check
    from forerun.units import Count

    for part in corpus.parts:
        # Not `or`: both the tokens and the plans are compared.
        added = any([check(part.store.folder, upgrade=True), *(rows.check() for rows in part.plans)])
        said = f"{Count(part.store.counts.tokens)} tokens are as they were written, {part.store.folder}"
        print(f"{part.name}: {said}" + ("; checksums of blocks were added" if added else ""))
    return 0


def _compare(job: Job, corpus: Corpus, ledger: Path) -> int:
    """Whether a run's ledger is the order that the job says; exit code 2 if not."""
    from forerun.data.order.batches import Batches
    from forerun.data.order.ledger import drawn

    batches = Batches(corpus.rows, seed=job.seed, batch=job.batch)
    steps = examples = left_out = 0
    for step, found, why in drawn(ledger):
        wanted = batches.examples_at(step - 1)
        if found != wanted:
            at = next(
                (n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
                min(len(found), len(wanted)),
            )
            raise UserError(
                f"{ledger}: step {step} learned from other examples than the job says",
                why=f"example {at}: {list(found[at]) if at < len(found) else 'none'} in the ledger, "
                f"{list(wanted[at]) if at < len(wanted) else 'none'} by the job",
                fix="compare the run's job.yaml (data, seed, batch, sequence) with this job",
            )
        steps, examples, left_out = steps + 1, examples + len(found), left_out + (why is not None)
    but = f"; {left_out} of these steps were left out by the guard" if left_out else ""
    print(f"{ledger}: {steps} steps and {examples} examples, all as the job says{but}")
    return 0


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(
            f"--shard {text}", why="it is I/N with I from 0 to N-1", fix="for four shards: 0/4, 1/4, 2/4 and 3/4"
        )
    return int(index), int(count)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A bar on a terminal, a line now and then elsewhere; on stderr, so that stdout is the answer alone."""
    from forerun.loop.corpus import progress_in
    from forerun.track.display import make_display

    with make_display(sys.stderr) as display, display.phase("data") as phase:
        yield progress_in(phase, display)
        phase.detail = ""
