"""The data of a run: opening with progress for the user, and the batches of this host."""

from __future__ import annotations

from forerun.data.corpus import Corpus, OnProgress
from forerun.data.order.batches import Batches
from forerun.data.tokens.build import BuildProgress
from forerun.program.build import Program
from forerun.resolve.job_corpus import open_corpus
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run.placement import Placement
from forerun.track.display.display import Display, Phase
from forerun.units import Bytes, Count, Seconds


def open_corpus_with_progress(resolved: ResolvedJob, display: Display, host: tuple[int, int] = (0, 1)) -> Corpus:
    """Return the job's corpus. Show the progress, a summary and warnings on the display.

    `host` is this host and the number of hosts, which share the work on a store in a bucket.
    """
    with display.phase("data") as phase:
        corpus = open_corpus(resolved, progress_callback(phase), host)
        first_line, *other_lines = corpus.lines()
        phase.detail = first_line
    for line in other_lines:
        display.say(f"data  {line}")
    for text in corpus.warnings:
        display.warn(text)
    return corpus


def progress_callback(phase: Phase) -> OnProgress:
    """Return a callback that shows the progress of tokenizing in the line of the phase."""

    def report(name: str, progress: BuildProgress) -> None:
        share = progress.done_bytes / max(1, progress.total_bytes)
        eta = "" if progress.eta_seconds is None else f"  eta {Seconds(progress.eta_seconds)}"
        phase.detail = (
            f"tokenizing {name}: {share:.0%} of {Bytes(progress.total_bytes)}  {Count(progress.tokens)} tokens{eta}"
        )

    return report


def batches_of(resolved: ResolvedJob, program: Program, corpus: Corpus) -> Batches:
    """Return the batches of a run. Each host builds only the rows of its devices.

    The global batch t depends only on the seed and on t. A resumed run, also on another mesh, sees the same batches.
    """
    job, held = resolved.job, Placement(program.batch).held
    return Batches(corpus.rows, seed=job.seed, batch=job.batch, accumulation=program.derived.accumulation, held=held)
