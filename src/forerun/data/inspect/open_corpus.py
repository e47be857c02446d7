"""Creation of a `CorpusReport` from an open corpus."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from forerun.config import schema
from forerun.data.corpus import Corpus, CorpusPart, packing_of
from forerun.data.documents import Documents
from forerun.data.inspect.corpus_report import CorpusReport, ExaminedDocuments, Lengths, SkippedRows, SourceSummary
from forerun.data.inspect.measure import examine_documents, examine_rows, lengths_of, samples_of
from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.pairs import PairDocuments, Pairs
from forerun.data.order.rows import PackedRows
from forerun.data.order.subset import packer_of
from forerun.data.reads.cache_size import cache_size
from forerun.hardware.object_storage import ReadLoad, StorageReads
from forerun.storage.address import Address

SKIPPED_SHOWN = 10


def report_of(job: schema.Job, corpus: Corpus, *, samples: int = 2) -> CorpusReport:
    """Return the report on an open corpus. The samples are the first rows of the first batch."""
    rows = corpus.rows
    batch = min(job.batch, len(rows))
    first = Batches(rows, seed=job.seed, batch=batch).ids_at(0)[:samples]
    reports = [part.rows.report for part in corpus.parts]
    forms = sorted({part.source.form for part in corpus.parts})
    packings = sorted({packing_of(job.data, part.source) for part in corpus.parts})
    bad = itertools.chain.from_iterable(part.store.skipped for part in corpus.parts)
    return CorpusReport(
        title=job.name,
        sources=_sources(corpus),
        form=", ".join(forms),
        tokenizer=corpus.tokenizer.name,
        vocabulary=corpus.tokenizer.vocab,
        lengths=_lengths(corpus.parts),
        sequence=job.sequence,
        packing=" and ".join(packings),
        rows=rows.epoch,
        padding_share=1 - sum(r.positions for r in reports) / sum(r.rows * r.sequence for r in reports),
        batch=job.batch,
        seed=job.seed,
        samples=samples_of(rows.take, first.tolist(), corpus.tokenizer),
        rows_examined=examine_rows(rows.take, len(rows)),
        documents_examined=_merged([examine_documents(_documents(part), corpus.tokenizer) for part in corpus.parts]),
        too_long=sum(_too_long(part.rows) for part in corpus.parts),
        too_long_policy=_policy(corpus.parts),
        steps=job.steps,
        held_out=[held for part in corpus.parts if (held := part.held_out) is not None],
        skipped=sum(part.store.bad for part in corpus.parts),
        skipped_first=[
            SkippedRows(str(one.place), f"{one.what}: {one.why}" if one.why else one.what)
            for one in itertools.islice(bad, SKIPPED_SHOWN)
        ],
        rendering=list(dict.fromkeys(part.rendering for part in corpus.parts if part.rendering)),
        unused=list(dict.fromkeys(name for part in corpus.parts for name in part.source.unused)),
        storage=_storage(job, corpus),
    )


def _storage(job: schema.Job, corpus: Corpus) -> StorageReads | None:
    """Return the requests that one host needs for the store of the job; None if the store is on this machine."""
    protocol = Address.of(job.data.store or "").protocol
    if protocol is None:
        return None
    train = [part.store.train for part in corpus.parts]
    concatenated = all(isinstance(part.rows, Concatenated) for part in corpus.parts)
    documents, rows = sum(map(len, train)), len(corpus.rows)
    load = ReadLoad(
        protocol,
        job.batch,
        job.sequence,
        max(one.token_bytes for one in train),
        rows=rows,
        steps=job.steps,
        documents=documents,
        ranges_per_row=1.0 if isinstance(packer_of(corpus.parts[0].rows), Concatenated) else max(1.0, documents / rows),
        has_mask=any(one.masked for one in train),
        weighted_parts=len(train) if any(part.weight is not None for part in job.data.parts.values()) else 0,
        can_use_blocks=concatenated,
        cache_bytes=cache_size(job.data).limit_bytes,
    )
    return StorageReads.of(load, job.data.shuffle)


def _documents(part: CorpusPart) -> Documents:
    """Return the training documents of a part. A preference pair counts as one document."""
    return PairDocuments(part.store.train) if isinstance(part.rows, Pairs) else part.store.train


def _too_long(rows: PackedRows) -> int:
    packer = packer_of(rows)
    return packer.count_too_long() if isinstance(packer, Concatenated) else rows.report.too_long


def _policy(parts: Sequence[CorpusPart]) -> str:
    """Return what happens to documents that are too long, in the first part that does not concatenate documents."""
    packers = [packer_of(part.rows) for part in parts]
    rows = next((rows for rows in packers if not isinstance(rows, Concatenated)), packers[0])
    became = rows.report.became
    return "shorten" if isinstance(rows, Pairs) and became == "keep_end" else became


def _sources(corpus: Corpus) -> list[SourceSummary]:
    whole = sum(len(part.rows) * passes for part, passes in zip(corpus.parts, corpus.rows.passes, strict=True))
    alone = len(corpus.parts) == 1
    return [
        SourceSummary(
            name=part.name,
            recognised=part.source.recognised,
            files=len(part.source.files),
            size_bytes=part.source.size_bytes,
            documents=part.rows.report.documents,
            tokens=part.rows.report.tokens,
            share=None if alone else len(part.rows) * passes / whole,
            passes=None if alone else passes,
        )
        for part, passes in zip(corpus.parts, corpus.rows.passes, strict=True)
    ]


def _lengths(parts: Sequence[CorpusPart]) -> Lengths:
    found = [lengths_of(_documents(part)) for part in parts]
    return Lengths(np.concatenate([one.values for one in found]), sum(one.documents for one in found))


def _merged(found: Sequence[ExaminedDocuments]) -> ExaminedDocuments:
    """Return the sum of the counts of all parts, the first of each text, and the most frequent document."""
    values: dict[str, Any] = {
        field.name: sum(getattr(one, field.name) for one in found)
        if field.type == "int"
        else next((getattr(one, field.name) for one in found if getattr(one, field.name)), "")
        for field in fields(ExaminedDocuments)
    }
    return ExaminedDocuments(**values | {"most_often": max(one.most_often for one in found)})
