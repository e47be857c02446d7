"""Creation of a `CorpusReport` from an open corpus, by counts in documents and rows.

The work is bounded: a large corpus is measured in an evenly spaced sample, and the `CorpusReport` reports this.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.config import schema
from forerun.data.corpus import Corpus, CorpusPart, packing_of
from forerun.data.documents import Documents
from forerun.data.inspect.corpus_report import (
    CorpusReport,
    ExaminedDocuments,
    ExaminedRows,
    Lengths,
    RowSegment,
    Sample,
    SkippedRows,
    SourceSummary,
)
from forerun.data.inspect.pieces import BYTE_END, Spelling, pieces, spelling_of, visible
from forerun.data.order.batches import Batches
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.held_out import packer_of
from forerun.data.order.pairs import PairDocuments, Pairs
from forerun.data.order.rows import PackedRows
from forerun.data.reads.cache_size import cache_size
from forerun.data.tokenizer import Tokenizer
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


def _documents(part: CorpusPart) -> Documents | PairDocuments:
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


# ---- Counts in documents and rows ----


LENGTHS_AT_MOST = 1 << 18
BLOCK = 256  # lengths that are adjacent on disk and read together
DOCUMENTS_AT_MOST, ROWS_AT_MOST = 2000, 512
TOKENS_OF_A_DOCUMENT = 1 << 20
TOKENS_AT_MOST = 1 << 23
TAIL, LAST_FEW = 4096, 3  # tokens at the end of a document
BEGINNING = 60  # characters of a text that are quoted
UNKNOWN = ("<unk>", "[UNK]", "<|unk|>")
NO_MARKS = ("<s>", "</s>", "<pad>", BYTE_END, *UNKNOWN)  # not suspicious: HTML and prose contain them too

Take = Callable[[ArrayLike], Mapping[str, NDArray[Any]]]


def lengths_of(documents: Documents | PairDocuments, at_most: int = LENGTHS_AT_MOST) -> Lengths:
    """Return the lengths of all documents, or of about `at_most` documents in evenly spaced blocks."""
    count = len(documents)
    if count <= at_most:
        return Lengths(np.diff(documents.begins(np.arange(count + 1))), count)
    block = min(BLOCK, at_most)
    starts = _evenly_spaced(count - block + 1, max(1, at_most // block))
    found = [np.diff(documents.begins(start + np.arange(block + 1))) for start in starts]
    return Lengths(np.concatenate(found), count)


def examine_rows(take: Take, rows: int, at_most: int = ROWS_AT_MOST) -> ExaminedRows:
    """Return counts in evenly spaced rows. `take` returns the five arrays of a batch of rows."""
    index = _evenly_spaced(rows, at_most)
    positions = padding = learned = unlearned = 0
    for some in np.array_split(index, max(1, len(index) // 32)):
        arrays = take(some)
        weighted = np.asarray(arrays["weights"]) > 0
        positions += weighted.size
        padding += int(np.sum(np.asarray(arrays["segments"]) == 0))
        learned += int(weighted.sum())
        unlearned += int(np.sum(~weighted.any(axis=1)))
    return ExaminedRows(len(index), positions, padding, learned, unlearned)


def examine_documents(
    documents: Documents | PairDocuments, tokenizer: Tokenizer, at_most: int = DOCUMENTS_AT_MOST
) -> ExaminedDocuments:
    """Return counts of beginnings, ends, masks and repetitions in evenly spaced documents."""
    spelling = spelling_of(tokenizer)
    names = {token: name for token in range(tokenizer.vocab) if (name := spelling.special(token))}
    unknown = [token for token, name in names.items() if name in UNKNOWN]
    marks = sorted(name for name in names.values() if name not in NO_MARKS)
    seen: Counter[bytes] = Counter()
    first: dict[bytes, NDArray[Any]] = {}
    unlearned = endless = doubled = spelled_out = unknowns = tokens = examined = 0
    start = spelled = ""
    for d in _evenly_spaced(len(documents), at_most).tolist():
        begin, end = (int(at) for at in documents.begins([d, d + 1]))
        ids, learned = documents.read(begin, min(end, begin + TOKENS_OF_A_DOCUMENT))
        examined, tokens = examined + 1, tokens + len(ids)
        if not len(ids):
            continue
        unlearned += learned is not None and not learned.any()
        endless += not _teaches_stop(*documents.read(max(begin, end - TAIL), end), spelling)
        if len(ids) > 1 and ids[0] == ids[1] and (name := spelling.special(int(ids[0]))):
            doubled, start = doubled + 1, name
        unknowns += int(np.isin(ids, unknown).sum()) if unknown else 0
        text = tokenizer.decode(ids[:4096]) if marks else ""
        if mark := next((mark for mark in marks if mark in text), None):
            spelled_out, spelled = spelled_out + 1, spelled or mark
        digest = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).digest()
        seen[digest] += 1
        if seen[digest] == 1:
            first[digest] = np.array(ids[: 2 * BEGINNING])
        if tokens > TOKENS_AT_MOST:
            break
    often = seen.most_common(1)
    text = _beginning(tokenizer.decode(first[often[0][0]])) if often and often[0][1] > 1 else ""
    return ExaminedDocuments(
        documents=examined,
        unlearned=unlearned,
        endless=endless,
        doubled_start=doubled,
        start=start,
        repeated=sum(seen.values()) - len(seen),
        most_often=(often[0][1], text) if often else (1, ""),
        spelled_out=spelled_out,
        spelled=spelled,
        unknown_tokens=unknowns,
        tokens=tokens,
    )


def samples_of(take: Take, rows: Sequence[int], tokenizer: Tokenizer) -> list[Sample]:
    """Return rows exactly as the model will see them."""
    if not len(rows):
        return []
    spelling = spelling_of(tokenizer)
    arrays = {name: np.asarray(array) for name, array in take(np.asarray(rows, np.int64)).items()}
    return [
        sample_of(int(row), {name: array[n] for name, array in arrays.items()}, spelling) for n, row in enumerate(rows)
    ]


def sample_of(row: int, arrays: Mapping[str, NDArray[Any]], spelling: Spelling) -> Sample:
    """Return one row of the five arrays.

    A token has a loss if the position before it, which predicts it, has a weight.
    """
    tokens, weights, segments = arrays["tokens"], arrays["weights"] > 0, arrays["segments"]
    learned = np.concatenate([[False], weights[:-1] & (segments[1:] == segments[:-1])])
    found = []
    borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    for begin, end in itertools.pairwise(borders):
        if begin < end and segments[begin] > 0:
            position = int(arrays["positions"][begin])
            parts = pieces(tokens[begin:end].tolist(), spelling, learned[begin:end].tolist(), position)
            target = int(arrays["targets"][end - 1])
            behind = pieces([target], spelling, [True], position + end - begin)[0] if weights[end - 1] else None
            found.append(RowSegment(int(segments[begin]), parts, behind))
    return Sample(row, tuple(found), int(np.sum(segments == 0)))


def _evenly_spaced(count: int, at_most: int) -> NDArray[np.int64]:
    """Return at most `at_most` evenly spaced numbers below `count`, including the first and the last."""
    if count <= at_most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, at_most).astype(np.int64))


def _teaches_stop(ids: NDArray[Any], learned: NDArray[np.bool_] | None, spelling: Spelling) -> bool:
    """Return whether the end of a document teaches the model to stop.

    With a mask, the last token with a loss must be special; a template may write a line end after it. Without a mask,
    one of the last few tokens must be special.
    """
    if learned is not None and learned.any():
        ids = ids[: int(np.flatnonzero(learned)[-1]) + 1][-1:]
    return any(spelling.special(int(token)) is not None for token in ids[-LAST_FEW:])


def _beginning(text: str) -> str:
    short = visible(" ".join(text.split()))
    return short if len(short) <= BEGINNING else short[: BEGINNING - 1] + "…"
