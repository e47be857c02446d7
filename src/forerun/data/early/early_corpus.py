"""The data of a job that starts early: training begins with the first window, while worker processes build the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forerun.config import schema
from forerun.data.corpus import (
    PLANS,
    Corpus,
    CorpusPart,
    Dialect,
    OnProgress,
    held_out_rows,
    packed,
    packing_of,
    recipe_of,
    store_root,
    tokenize,
)
from forerun.data.early.arrival import Build, Say, UnitArrival, lower_priority
from forerun.data.early.mixture import EarlyMixture
from forerun.data.early.stream import OpenRange, WindowStream
from forerun.data.early.windows import RULE, UnitRange, Window, windows_of
from forerun.data.order.rows import NoRowsError, PackedRows
from forerun.data.order.too_long import resolve_policy
from forerun.data.reads.block_reader import BlockReader
from forerun.data.reads.store_reads import StoreReads, job_reads
from forerun.data.rendering import notes_of, rendering_of
from forerun.data.source.sources import Source, open_source
from forerun.data.tokens.build import BuildProgress, is_complete
from forerun.data.tokens.recipe import Recipe
from forerun.data.tokens.shared_store.unit_table import UnitTable
from forerun.data.tokens.store import TokenStore, read_index
from forerun.data.tokens.stored_documents import StoredDocuments
from forerun.data.tokens.unit import units_of
from forerun.storage.folder import Folder
from forerun.storage.open_folder import folder_at

RequireIds = Callable[[int], None]  # raises if a token id is beyond the vocabulary


@dataclass(frozen=True)
class EarlyPart(CorpusPart):
    """One source of the data. Its store and its rows are those of its first window."""

    units: int = 0
    ready: int = 0  # units that existed when the corpus was opened
    windows: int = 0

    @property
    def line(self) -> str:
        """A summary: `1 file, jsonl, column text  2 of 96 units tokenized  12 windows`."""
        texts = [*self.read_as, f"{self.ready} of {self.units} units tokenized", f"{self.windows} windows"]
        if (held := self.held_out) is not None and held.held:
            texts.append(f"validation, from the first window: {held.counted}")
        return "  ".join(texts)


@dataclass(frozen=True)
class EarlyCorpus(Corpus):
    """The data of a job whose units arrive while it is trained."""

    arrivals: tuple[UnitArrival, ...] = ()

    def lines(self) -> list[str]:
        if len(self.parts) == 1:
            return [self.parts[0].line]
        return [f"{part.name}: {part.line}" for part in self.parts]

    def begin_steps(self, say: Say) -> None:
        for arrival in self.arrivals:
            arrival.speak(say)
        lower_priority()

    def close(self) -> None:
        for arrival in self.arrivals:
            arrival.close()


@dataclass(frozen=True)
class _ArrivingPart:
    """One part of the data with its units, and how their documents are packed."""

    arrival: UnitArrival
    vocab: int
    packing: str
    reader: BlockReader | None  # of a store in a bucket

    def documents(self, side: str, units: UnitRange) -> StoredDocuments:
        """Return the documents of a range of units. Wait until they exist."""
        entries = UnitTable(self.arrival.entries(units.start, units.stop))
        return StoredDocuments(self.arrival.folder, side, self.vocab, entries, self.reader)

    def store(self, units: UnitRange) -> TokenStore:
        train, kept = self.documents("train", units), self.documents("validation", units)
        rows, bad = (int(train.units.column(name).sum()) for name in ("rows", "bad"))
        return TokenStore(self.arrival.folder, train, kept if len(kept) else None, rows, bad, train.units.checked)


def open_early_corpus(
    data: schema.Data,
    dialect: Dialect,
    *,
    sequence: int,
    vocab: int | None,
    require_ids: RequireIds,
    host: tuple[int, int] = (0, 1),
    on_progress: OnProgress | None = None,
) -> EarlyCorpus:
    """Return the data of a job as soon as its first window exists. Other units are built in the background.

    Args:
      data: the data section of the job.
      dialect: the tokenizer and the chat template.
      sequence: positions of a row.
      vocab: the model's number of token ids, if it is known.
      require_ids: called with the largest token id of each range of units, before its rows are used.
      host: (i, n) for host i of the n hosts of a run, which share the work on a store in a bucket. Other stores may
        be private, so each host builds all units.
      on_progress: called with the name of a part and the progress of its tokenization, by another thread.

    Raises:
      UserError: a source cannot be read, or its first window cannot be used.
    """
    reads = None if folder_at(store_root(data)).is_local else job_reads(data)
    workers = None if data.workers is None else max(1, data.workers // len(data.parts))
    opened, arriving = [], []
    for name, part in data.parts.items():
        source = open_source(part, by_range=True)
        recipe = recipe_of(source, data, dialect, vocab)
        folder = folder_at(store_root(data)).inside(recipe.key(source))
        complete = is_complete(folder)
        if complete:
            tokenize(source, recipe, data)  # compares the limits on bad rows
        entries = read_index(folder)["units"] if complete else []
        arrival = UnitArrival(name, folder, units_of(source), entries)
        if not complete:
            arrival.start(_builder(source, recipe, data, workers, host), _named(on_progress, name))
        opened.append((source, recipe, entries))
        arriving.append(_ArrivingPart(arrival, recipe.vocab, packing_of(data, source), _reader(reads, folder)))
    try:
        rows, firsts, counts = _early_rows(arriving, data, sequence, require_ids)
        parts = []
        for at, (source, recipe, entries) in enumerate(opened):
            one, store = arriving[at], arriving[at].store(firsts[at])
            parts.append(
                EarlyPart(
                    one.arrival.name,
                    source,
                    store,
                    packed(store.train, one.packing, sequence, data, store.local_folder / PLANS),
                    _kept(store, one.packing, sequence, data),
                    data.validation,
                    tuple(notes_of(source, recipe, data, dialect.tokenizer)),
                    rendering_of(source, recipe, data),
                    units=len(one.arrival.units),
                    ready=len(entries) or firsts[at].stop,
                    windows=counts[at],
                )
            )
        kept = held_out_rows(tuple(parts))
    except BaseException:
        for one in arriving:
            one.arrival.close()
        raise
    arrivals = tuple(one.arrival for one in arriving)
    return EarlyCorpus(dialect.tokenizer, tuple(parts), rows, kept, reads, arrivals)


def _reader(reads: StoreReads | None, folder: Folder) -> BlockReader | None:
    return None if reads is None else reads.reader(folder)


def with_early_order(corpus: Corpus, data: schema.Data, sequence: int) -> Corpus:
    """Return a corpus whose stores are complete with the order and the validation rows of a job that starts early."""
    arriving = [
        _ArrivingPart(
            UnitArrival(part.name, part.store.folder, units_of(part.source), part.store.train.units),
            part.store.train.vocab,
            packing_of(data, part.source),
            part.store.train.reader,
        )
        for part in corpus.parts
    ]
    rows, firsts, _ = _early_rows(arriving, data, sequence, lambda largest: None)
    parts = tuple(
        replace(part, kept=_kept(one.store(first), one.packing, sequence, data))
        for part, one, first in zip(corpus.parts, arriving, firsts, strict=True)
    )
    return replace(corpus, parts=parts, rows=rows, kept=held_out_rows(parts))


def _early_rows(
    arriving: Sequence[_ArrivingPart], data: schema.Data, sequence: int, require_ids: RequireIds
) -> tuple[EarlyMixture, list[UnitRange], list[int]]:
    """Return the rows, and for each part its units in its first window and its number of windows."""

    def opener(units: UnitRange) -> OpenRange:
        one = arriving[units.part]
        store = one.store(units)
        require_ids(store.train.largest)
        rows = packed(store.train, one.packing, sequence, data, store.local_folder / PLANS)
        return OpenRange(rows, one.arrival.documents_before(units.start))

    def raise_failure() -> None:
        for one in arriving:
            one.arrival.raise_failure()

    numbers = list(range(len(arriving)))
    weights = [part.weight for part in data.mixture.values() if part.weight is not None]
    sizes = [[unit.size_bytes for unit in one.arrival.units] for one in arriving]
    if weights:
        lists = [windows_of([number], [sizes[number]]) for number in numbers]
        streams = [WindowStream(windows, opener, (number,)) for number, windows in enumerate(lists)]
    else:
        lists = [windows_of(numbers, sizes)]
        streams = [WindowStream(lists[0], opener)]
    mixture = EarlyMixture(
        streams,
        weights or None,
        [one.arrival.name for one in arriving],
        sequence=sequence,
        digest=_digest(arriving, weights, data, sequence),
        raise_failure=raise_failure,
    )
    firsts = [units for windows in lists for units in windows[0]]
    return mixture, firsts, [_windows_with(number, lists) for number in numbers]


def _windows_with(part: int, lists: Sequence[Sequence[Window]]) -> int:
    return sum(any(units.part == part for units in window) for windows in lists for window in windows)


def _digest(arriving: Sequence[_ArrivingPart], weights: Sequence[float], data: schema.Data, sequence: int) -> str:
    """Return the identity of the data and its order, which is known before the tokens are.

    The key of a store identifies its source files and how they become tokens.
    """
    keys = [(one.arrival.folder.address.rpartition("/")[2], one.packing) for one in arriving]
    too_long = resolve_policy(data.too_long, pairs=False)
    identity = f"early 1 {RULE} {keys} {list(weights)} {sequence} {too_long}"
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _kept(store: TokenStore, packing: str, sequence: int, data: schema.Data) -> PackedRows | None:
    """Return the rows that are held out for validation: those of the first window."""
    if store.validation is None:
        return None
    try:
        return packed(store.validation, packing, sequence, data, store.local_folder / PLANS)
    except NoRowsError:
        return None


def _builder(source: Source, recipe: Recipe, data: schema.Data, workers: int | None, host: tuple[int, int]) -> Build:
    limited = data if workers is None else data.model_copy(update={"workers": workers})

    def run(tell: Callable[[BuildProgress], None]) -> None:
        tokenize(source, recipe, limited, on_progress=tell, host=host)

    return run


def _named(on_progress: OnProgress | None, name: str) -> Callable[[BuildProgress], None] | None:
    return None if on_progress is None else lambda progress: on_progress(name, progress)
