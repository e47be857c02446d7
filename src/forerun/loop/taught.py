"""What was written down of a teacher, beside the rows of the job that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forerun.config.schema import Job
from forerun.data.corpus import Corpus
from forerun.data.taught.layout import Layout
from forerun.data.taught.reader import Taught, require_whole
from forerun.data.taught.shards import Identity, differences, read_manifest
from forerun.errors import UserError
from forerun.loop.corpus import model_vocab
from forerun.models.teacher import teacher_section
from forerun.objectives.distil import ids_dtype
from forerun.objectives.soft import IDS, TAIL, VALUES


def rows_digest(corpus: Corpus) -> str:
    """Of the rows in the order of their numbers: first those to learn from, then those kept for validation."""
    parts = [*corpus.rows.parts, *(corpus.kept.parts if corpus.kept else ())]
    return " ".join(part.digest for part in parts)


def row_count(corpus: Corpus) -> int:
    return len(corpus.rows) + (len(corpus.kept) if corpus.kept else 0)


def public_name(job: Job) -> str:
    """Of a folder its last part only: it may lie elsewhere on another machine."""
    name = str(teacher_section(job).name)
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def taught(job: Job, corpus: Corpus) -> Corpus:
    """The corpus with the teacher's words beside every row, if the job has them from a cache. The job is concrete."""
    if job.distil is None or job.distil.cache is None:
        return corpus
    folder, vocab = Path(job.distil.cache), model_vocab(job)
    assert vocab is not None, "the job is concrete"
    shards = read_manifest(folder)
    if shards is None:
        raise UserError(
            f"distil.cache: {folder} holds no teacher's words yet",
            why="a job with distil.cache learns from what `forerun cache` has written down",
            fix="forerun cache JOB makes it; or leave distil.cache out, and the teacher runs in every step",
        )
    made = shards.identity
    whole = made.layout.top_k == made.layout.vocab
    wanted = Identity(
        data=rows_digest(corpus),
        tokenizer=corpus.tokenizer.name,
        teacher=public_name(job),
        fingerprint=made.fingerprint,  # the teacher's files need not be here
        compute=made.compute,
        layout=Layout(
            row_count(corpus),
            job.sequence,
            min(job.distil.top_k, vocab),
            min(made.layout.vocab, vocab),
            made.layout.temperatures,
        ),
    )
    found = [*differences(made, wanted)]
    if job.distil.temperature not in made.layout.temperatures and not whole:
        served = " and ".join(f"{one:g}" for one in made.layout.temperatures)
        found.append(
            f"distil.temperature: {job.distil.temperature:g}, and the mass beyond the {made.layout.top_k} likeliest "
            f"tokens is known at {served} only"
        )
    if found:
        raise UserError(
            f"{folder} was not made for this job",
            why="\n".join(found),
            fix="change the job back, or make another: forerun cache JOB distil.cache=OTHER_FOLDER",
        )
    require_whole(shards)
    ids = ids_dtype(vocab)
    reader = Taught(folder, (VALUES, IDS, TAIL), job.distil.temperature, ids)
    kept = Taught(folder, (VALUES, IDS, TAIL), job.distil.temperature, ids, first=len(corpus.rows))
    return replace(
        corpus,
        rows=corpus.rows.accompanied(reader),
        kept=corpus.kept.accompanied(kept) if corpus.kept else None,
    )
