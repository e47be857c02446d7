"""The data of a job: inspect, tokenize and verify it, and compare the ledger of a run with it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import UserError
from forerun.files import write_output
from forerun.reporter import LineReporter, Phase
from forerun.verbs.job_files import prepared
from forerun.verbs.option_types import Count

if TYPE_CHECKING:
    from forerun.config.schema import Job
    from forerun.console import SafeConsole
    from forerun.data.corpus import Corpus
    from forerun.data.inspect.corpus_report import CorpusReport
    from forerun.data.tokens.worker_pool import StartEngine
    from forerun.resolve.resolved_job import ResolvedJob

PIPED_COLUMNS = 100


@dataclass(frozen=True)
class DataReport:
    """The data of a job as the model will see it: sources, lengths, packing, sample rows and findings.

    Attributes:
      job: the job.
      look: the figures and the sample rows.
      warnings: probable mistakes in the data.
    """

    job: Job
    look: CorpusReport
    warnings: tuple[str, ...]

    def print(self, console: SafeConsole, *, full: bool = False) -> None:
        """Print the report. `full` prints long rows completely."""
        from forerun.data.inspect.terminal import print_report

        print_report(console, self.look, full=full)

    def to_html(self) -> str:
        """Return the page with charts that `forerun data --html` writes."""
        from forerun.data.inspect.page import page

        return page(self.look)

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file. It loads nothing from the network and runs no script."""
        write_output(Path(file), self.to_html(), fix="name another file with --html")

    def __repr__(self) -> str:
        from forerun.console import SafeConsole

        stream = io.StringIO()
        self.print(SafeConsole(file=stream, width=PIPED_COLUMNS, force_terminal=False))
        return stream.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        import html

        title = html.escape(f"data of {self.job.name}", quote=True)
        content = html.escape(self.to_html(), quote=True)
        style = "width: 100%; height: 480px; border: 0"
        return f'<iframe sandbox title="{title}" style="{style}" srcdoc="{content}"></iframe>'


def inspect_data(job: Job | str | os.PathLike[str], *, samples: Count = 2) -> DataReport:
    """Tokenize and pack the data of a job, if that is not done yet, and report what the model will see.

    Args:
      job: a job, or the path of a job file
      samples: number of rows to show as the model sees them

    Raises:
      UserError: The data cannot be read.
    """
    from forerun.data.inspect.open_corpus import report_of
    from forerun.resolve.resolve_model import resolve_model

    job = prepared(job)
    corpus = opened(resolve_model(job))
    return DataReport(job, report_of(job, corpus, samples=samples), tuple(corpus.warnings))


def tokenize_data(
    job: Job | str | os.PathLike[str], *, shard: tuple[int, int] = (0, 1), ray: str | None = None
) -> dict[str, tuple[Path | str, bool]]:
    """Tokenize the data of a job, or one share of it, so that several machines can divide the work.

    Args:
      job: a job, or the path of a job file.
      shard: (i, n) for share i of n, with i from 0 to n - 1. The machine that finishes last writes the index.
      ray: the address of a Ray cluster whose nodes tokenize, or `auto`; by default the cores of this machine do.

    Returns:
      For each part of the data the folder of its tokens, or its address in a bucket, and whether all shares are
      complete.

    Raises:
      UserError: The data cannot be read, or the cluster cannot be used. Finished units are kept.
    """
    from forerun.data.corpus import recipe_of, tokenize
    from forerun.data.source.sources import open_source
    from forerun.data.tokens.build import is_complete
    from forerun.resolve.job_corpus import dialect_of, require_chosen_tokenizer
    from forerun.resolve.resolve_model import resolve_model

    resolved = resolve_model(prepared(job))
    require_chosen_tokenizer(resolved)
    job, dialect, vocab = resolved.job, dialect_of(resolved), resolved.vocab
    done = {}
    with _engine(ray) as engine:
        for name, part in job.data.parts.items():
            source = open_source(part)
            recipe = recipe_of(source, job.data, dialect, vocab, pairs=job.method.data_is_pairs)
            with _data_phase() as phase:
                folder = tokenize(source, recipe, job.data, shard=shard, name=name, phase=phase, engine=engine)
            done[name] = folder.location, is_complete(folder)
    return done


def _engine(ray: str | None) -> AbstractContextManager[StartEngine]:
    """Return what builds the units: worker processes, or a Ray cluster that is connected inside the block."""
    from forerun.data.tokens.worker_pool import Pool

    if ray is None:
        return nullcontext(Pool)
    from forerun.data.tokens.ray_cluster import ray_cluster

    return ray_cluster(ray)


@dataclass(frozen=True)
class VerifiedPart:
    """A part of the data whose tokens are as they were written.

    Attributes:
      tokens: the number of tokens.
      folder: the folder of the tokens, or its address in a bucket.
    """

    tokens: int
    folder: Path | str

    def __str__(self) -> str:
        from forerun.units import Count

        return f"{Count(self.tokens)} tokens are as they were written, {self.folder}"


def verify_data(job: Job | str | os.PathLike[str]) -> dict[str, VerifiedPart]:
    """Compare all tokens of a job with their checksums, and return the parts by name.

    Raises:
      UserError: A file is damaged.
    """
    from forerun.data.tokens.store import check
    from forerun.resolve.resolve_model import resolve_model

    found = {}
    for part in opened(resolve_model(prepared(job))).parts:
        check(part.store.folder)
        for rows in part.plans:
            rows.check()
        found[part.name] = VerifiedPart(part.store.counts.tokens, part.store.folder.location)
    return found


@dataclass(frozen=True)
class LedgerComparison:
    """A ledger that agrees with the job: the number of its steps, examples and skipped steps."""

    steps: int
    examples: int
    skipped: int

    def __str__(self) -> str:
        skipped = f"; {self.skipped} of these steps were skipped by the guard" if self.skipped else ""
        return f"{self.steps} steps and {self.examples} examples, all as the job says{skipped}"


def compare_ledger(job: Job | str | os.PathLike[str], ledger: str | os.PathLike[str]) -> LedgerComparison:
    """Check that a run's ledger.jsonl has the examples of each step in the order of the job.

    Raises:
      UserError: A step learned from other examples than the job says.
    """
    from forerun.data.order.batches import Batches
    from forerun.data.order.ledger import drawn
    from forerun.resolve.resolve_model import resolve_model

    resolved, file = resolve_model(prepared(job)), Path(ledger)
    corpus = opened(resolved)
    for text in corpus.warnings:
        LineReporter(sys.stderr).warn(text)
    batches = Batches(corpus.rows, seed=resolved.job.seed, batch=resolved.job.batch)
    steps = examples = skipped = 0
    for step, found, why in drawn(file):
        wanted = batches.examples_at(step - 1)
        if found != wanted:
            at = next(
                (n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
                min(len(found), len(wanted)),
            )
            raise UserError(
                "E-COMMAND-007",
                f"{file}: step {step} learned from other examples than the job says",
                why=f"example {at}: {list(found[at]) if at < len(found) else 'none'} in the ledger, "
                f"{list(wanted[at]) if at < len(wanted) else 'none'} by the job",
                fix="compare the run's job.yaml (data, seed, batch, sequence) with this job",
            )
        steps, examples, skipped = steps + 1, examples + len(found), skipped + (why is not None)
    return LedgerComparison(steps, examples, skipped)


def opened(resolved: ResolvedJob) -> Corpus:
    """Open the data of a job, and show the progress of tokenizing."""
    from forerun.resolve.job_corpus import open_corpus

    with _data_phase() as phase:
        return open_corpus(resolved, phase)


@contextmanager
def _data_phase() -> Iterator[Phase]:
    """Show a phase on stderr, so that stdout has the result only."""
    from forerun.track.display.make_display import make_display

    with make_display(sys.stderr) as reporter, reporter.phase("data") as phase:
        yield phase
        phase.detail = ""
