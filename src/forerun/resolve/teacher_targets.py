"""Cached teacher logits as extra arrays of a job's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forerun.data.corpus import Corpus
from forerun.data.teacher_cache import CachedTeacherRows, Identity, Layout, differences, read_manifest, require_complete
from forerun.errors import UserError
from forerun.models.model_facts import ModelFacts
from forerun.objectives.distil import IDS, TAIL, VALUES, ids_dtype
from forerun.resolve.resolved_job import ResolvedJob


def rows_digest(corpus: Corpus) -> str:
    """Return a digest of all rows in the order of the cache: training rows first, then held-out rows."""
    parts = [*corpus.rows.parts, *(corpus.kept.parts if corpus.kept else ())]
    return " ".join(part.digest for part in parts)


def row_count(corpus: Corpus) -> int:
    """Return the number of training rows and held-out rows."""
    return len(corpus.rows) + (len(corpus.kept) if corpus.kept else 0)


def public_name(teacher: ModelFacts) -> str:
    """Return the teacher's name. For a folder, it is the last part of the path, which is the same on all machines."""
    name = str(teacher.section.name)
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def with_teacher_targets(resolved: ResolvedJob, corpus: Corpus) -> Corpus:
    """Return the corpus with the cached teacher logits of every row, or unchanged if the job uses no cache.

    Raises:
      UserError: the cache is missing or incomplete, or was written for another job.
    """
    job, teacher, section = resolved.job, resolved.teacher, resolved.job.method.teacher
    if teacher is None or section is None or section.cache is None:
        return corpus
    folder, vocab = Path(section.cache), resolved.vocab
    shards = read_manifest(folder)
    if shards is None:
        raise UserError(
            "E-RUN-039",
            f"distil.cache: {folder} contains no teacher logits yet",
            why="a job with distil.cache learns from the logits that `forerun cache` has written",
            fix="run forerun cache JOB; or remove distil.cache, and the teacher runs in every step",
        )
    made = shards.identity
    has_all_logits = made.layout.top_k == made.layout.vocab
    wanted = Identity(
        data=rows_digest(corpus),
        tokenizer=corpus.tokenizer.name,
        teacher=public_name(teacher),
        fingerprint=made.fingerprint,  # the teacher's files need not be on this machine
        compute=made.compute,
        layout=Layout(
            row_count(corpus),
            job.sequence,
            min(section.top_k, vocab),
            min(made.layout.vocab, vocab),
            made.layout.temperatures,
        ),
    )
    found = [*differences(made, wanted)]
    if section.temperature not in made.layout.temperatures and not has_all_logits:
        served = " and ".join(f"{one:g}" for one in made.layout.temperatures)
        found.append(
            f"distil.temperature: {section.temperature:g}, and the mass beyond the {made.layout.top_k} likeliest "
            f"tokens is known at {served} only"
        )
    if found:
        raise UserError(
            "E-RUN-040",
            f"{folder} was not written for this job",
            why="\n".join(found),
            fix="change the job back, or write another cache: forerun cache JOB distil.cache=OTHER_FOLDER",
        )
    require_complete(shards)
    ids = ids_dtype(vocab)
    reader = CachedTeacherRows(folder, (VALUES, IDS, TAIL), section.temperature, ids)
    kept = CachedTeacherRows(folder, (VALUES, IDS, TAIL), section.temperature, ids, first=len(corpus.rows))
    return replace(
        corpus,
        rows=corpus.rows.with_extra(reader),
        kept=corpus.kept.with_extra(kept) if corpus.kept else None,
    )
