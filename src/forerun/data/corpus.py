"""The data of a job: its sources, tokens and packed rows, with counts and warnings for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.config import schema
from forerun.data.chat_template import template_origin, thinking_variables
from forerun.data.documents import Documents
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.mixture import Mixture
from forerun.data.order.pairs import Pairs, describe_too_long
from forerun.data.order.rows import PackedRows
from forerun.data.order.subset import Subset, held_out, packer_of
from forerun.data.order.too_long import resolve_policy
from forerun.data.order.whole_documents import WholeDocuments
from forerun.data.reads.store_reads import StoreReads, job_reads
from forerun.data.rendering import applies_template, notes_of, rendering_of, required_template
from forerun.data.shares import HeldOut, require_held_out
from forerun.data.source.identity import cache_folder
from forerun.data.source.kinds import TOKEN_KINDS
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import Tokenizer
from forerun.data.tokens.build import BuildProgress, Limits, build
from forerun.data.tokens.engines.engine import StartEngine
from forerun.data.tokens.engines.pool import Pool
from forerun.data.tokens.exchange import CONVERSATION_FORMS
from forerun.data.tokens.recipe import Recipe, recipe_for
from forerun.data.tokens.store import TokenStore, open_store
from forerun.errors import UserError
from forerun.reporter import Phase
from forerun.storage.address import Address
from forerun.storage.folder import Folder
from forerun.storage.open_folder import folder_at
from forerun.units import Count

CHAT_FORMS = (*CONVERSATION_FORMS, "chosen/rejected")
PLANS = "rows"  # folder of packing plans, in the folder of a store


@dataclass(frozen=True)
class Dialect:
    """The model's tokenizer, and the chat template that turns a conversation into text."""

    tokenizer: Tokenizer
    template: str | None = None
    special: Mapping[str, Any] = field(default_factory=dict)  # texts of special tokens that the template uses


@dataclass(frozen=True)
class CorpusPart:
    """One source of the data, with its tokens and its packed rows."""

    name: str
    source: Source
    store: TokenStore
    rows: PackedRows
    kept: PackedRows | None = None  # rows that are held out for validation
    wanted: float = 0.0  # the share that the job asks to hold out
    notes: tuple[str, ...] = ()  # settings that are probably a mistake, for warnings
    rendering: str = ""  # how rows become text, for the display; "" for texts

    @property
    def plans(self) -> list[WholeDocuments]:
        """The rows whose packing plan is stored with the tokens."""
        packers = {id(rows): rows for rows in (packer_of(rows) for rows in (self.rows, self.kept) if rows is not None)}
        return [rows for rows in packers.values() if isinstance(rows, WholeDocuments)]

    @property
    def held_out(self) -> HeldOut | None:
        """The data that is held out for validation; None if the job does not ask for validation."""
        if not self.wanted:
            return None
        train, kept, held = self.store.train, self.store.validation, self.kept
        if isinstance(self.rows, Subset) or isinstance(held, Subset):
            held_count = 0 if held is None else len(held)
            count = len(packer_of(self.rows))
            return HeldOut(self.wanted, "rows", held_count, count, held_count / count)
        sides, word = (2, "pairs") if isinstance(self.rows, Pairs) else (1, "documents")
        held_count, tokens = (0, 0) if kept is None else (len(kept), kept.tokens)
        all_tokens = train.tokens + tokens
        return HeldOut(self.wanted, word, held_count // sides, (len(train) + held_count) // sides, tokens / all_tokens)

    @property
    def checked(self) -> bool:
        """Whether every file has checksums of its blocks; stores of earlier versions of forerun have none."""
        return self.store.checked and all(rows.checked for rows in self.plans)

    @property
    def read_as(self) -> list[str]:
        """How the rows are read: `1 file, jsonl, Alpaca, ...`, and how they become text if there is a choice."""
        ranges = "read from the hub by ranges" if self.source.is_read_by_ranges else ""
        return [text for text in (self.source.recognised, ranges, self.rendering) if text]

    @property
    def line(self) -> str:
        """A summary: `3 files, jsonl, column text  12 documents  1.02M tokens  996 rows of 1024  0.0% padding`.

        Documents that are too long, bad rows and held-out data follow if there are any.
        """
        report, store = self.rows.report, self.store
        word = "pair" if isinstance(self.rows, Pairs) else "document"
        texts = [
            *self.read_as,
            f"{report.documents} {word}{'' if report.documents == 1 else 's'}",
            f"{Count(report.tokens)} tokens",
            f"{report.rows} rows of {report.sequence}",
            f"{report.padding_share:.1%} padding",
        ]
        if report.too_long and isinstance(self.rows, Pairs):
            texts.append(describe_too_long(report))
        elif report.too_long and isinstance(packer_of(self.rows), WholeDocuments):
            texts.append(f"{report.too_long} longer than a row: {report.became.replace('_', ' ')}")
        if store.bad:
            texts.append(f"{store.bad} bad rows skipped")
        if (held := self.held_out) is not None and held.held:
            texts.append(f"validation: {held.counted}")
        if not store.folder.is_local:
            texts.append(f"in {store.folder.address}")
        return "  ".join(texts)


@dataclass(frozen=True)
class Corpus:
    """All data of a job as packed rows, from which batches are made."""

    tokenizer: Tokenizer
    parts: tuple[CorpusPart, ...]
    rows: Mixture
    kept: Mixture | None = None  # for validation
    reads: StoreReads | None = None  # of stores in a bucket; None if all are on this machine

    @cached_property
    def digest(self) -> str:
        """Digest of the tokens, their packing and their mixture, and the name of the order."""
        return f"{self.rows.digest} {self.rows.order}"

    @property
    def largest(self) -> int:
        """Largest token id of the training data."""
        return max(part.store.train.largest for part in self.parts)

    @property
    def warnings(self) -> list[str]:
        """Warnings about probable mistakes in each part, and about parts without checksums."""
        held = [part.held_out for part in self.parts]
        far = [f"{part.name}: {one.warning}" for part, one in zip(self.parts, held, strict=True) if one and one.is_far]
        notes = [f"{part.name}: {note}" for part in self.parts for note in part.notes]
        unchecked = [
            f"{part.name}: {part.store.folder.address} was written without checksums of its blocks, so damaged "
            "bytes would change the run silently: forerun data JOB --verify compares its files and adds the checksums"
            for part in self.parts
            if not part.checked
        ]
        return [*far, *notes, *unchecked]

    def lines(self) -> list[str]:
        """Return summaries for the display: one line, or one for each part of a mixture."""
        if len(self.parts) == 1:
            return [self.parts[0].line]
        seen = zip(self.parts, self.rows.passes, strict=True)
        return [f"{part.name}: {part.line}  {passes:.3g} passes per epoch" for part, passes in seen]


def open_corpus(
    data: schema.Data,
    dialect: Dialect,
    *,
    sequence: int,
    vocab: int | None = None,
    pairs: bool = False,
    phase: Phase | None = None,
    host: tuple[int, int] = (0, 1),
) -> Corpus:
    """Return the data of a job. Sources that are not tokenized yet are tokenized first.

    Args:
      data: the data section of the job.
      dialect: the tokenizer and the chat template.
      sequence: positions of a row.
      vocab: the model's number of token ids, if it is known. Sources that contain token ids are checked against it.
      pairs: whether the job trains on preference pairs. Then all sources must be pairs, and otherwise none.
      phase: shows the progress of tokenizing.
      host: (i, n) for host i of the n hosts of a run, which share the work on a store in a bucket.

    Raises:
      UserError: a source cannot be read, or its form does not match the job.
    """
    reads = job_reads(data) if data.store is not None and Address.of(data.store).is_bucket else None
    parts = tuple(
        _open_part(name, part, data, dialect, sequence, vocab, pairs, phase, reads, host)
        for name, part in data.parts.items()
    )
    weights = [part.weight for part in data.mixture.values() if part.weight is not None]
    row_bytes = max(part.store.train.token_bytes for part in parts) * sequence if data.shuffle == "blocks" else None
    rows = Mixture([part.rows for part in parts], weights or None, list(data.parts), row_bytes=row_bytes)
    if rows.block_orders:
        parts = tuple(_in_extents(part, rows.block_rows(n)) for n, part in enumerate(parts))
        rows = Mixture([part.rows for part in parts], weights or None, list(data.parts), row_bytes=row_bytes)
    return Corpus(dialect.tokenizer, parts, rows, _held_out_rows(parts), reads)


def tokenize(
    source: Source,
    recipe: Recipe,
    data: schema.Data,
    *,
    shard: tuple[int, int] = (0, 1),
    name: str = "",
    phase: Phase | None = None,
    engine: StartEngine = Pool,
    host: tuple[int, int] = (0, 1),
) -> Folder:
    """Return the folder of the source's tokens. Worker processes build the tokens that do not exist yet.

    Args:
      source: the files to tokenize.
      recipe: how rows become tokens.
      data: the data section of the job, for the store, the number of workers and the limits on bad rows.
      shard: (i, n) builds only every n-th unit of the store, from unit i on.
      name: the name of the part of the data that the source is.
      phase: shows the progress.
      engine: starts what builds the units, by default worker processes of this machine.
      host: (i, n) for host i of the n hosts of a run, which share the work on a store in a bucket.
    """

    def show(progress: BuildProgress) -> None:
        if phase is not None:
            phase.detail = progress.text(name)

    return build(
        source,
        recipe,
        store_root(data),
        workers=data.workers,
        shard=shard,
        limits=Limits(data.bad_rows, data.bad_files),
        on_unit=show,
        engine=engine,
        host=host,
    )


def recipe_of(
    source: Source, data: schema.Data, dialect: Dialect, vocab: int | None = None, *, pairs: bool = False
) -> Recipe:
    """Return how the rows of `source` become tokens. Raise UserError if the job cannot train on their form."""
    _require_form(source, data, pairs)
    has_ids = source.form == "input_ids"
    needs_end = source.kind in TOKEN_KINDS  # model.vocab alone does not say which token ends a document
    if has_ids and (vocab is None or needs_end) and data.tokenizer is None and dialect.tokenizer.path == "bytes":
        raise UserError(
            "E-DATA-003",
            f"{source.files[0].name}: token ids, but no tokenizer {'' if needs_end else 'or vocabulary '}to check them "
            "against",
            why=f"neither data.tokenizer nor {'a checkpoint with a tokenizer' if needs_end else 'model.vocab'} is set",
            fix="name the tokenizer that made them: data.tokenizer=PATH/tokenizer.json",
        )
    applied = applies_template(source.form, data, dialect.template)
    chat = source.form in CHAT_FORMS or applied
    template = required_template(source, data, dialect.template, applied=applied) if chat else None
    switch = (
        {} if template is None else thinking_variables(data.thinking, template, dialect.special, template_origin(data))
    )
    return recipe_for(
        dialect.tokenizer,
        vocab=vocab if has_ids else None,
        template=template,
        special=dict(dialect.special) | switch if chat else None,
        loss_on=data.loss_on,
        special_tokens=data.special_tokens,
        validation=data.validation if data.validation_by == "documents" else 0.0,
        template_origin=template_origin(data) if chat else None,
        apply_template=applied,
        system=data.system if chat else None,
        ignored_fields=tuple(data.ignored_fields) if chat else (),
    )


def store_root(data: schema.Data) -> Folder:
    """Return the folder of all token stores: `data.store`, which may be in a bucket, or a folder of the cache."""
    return folder_at(cache_folder() / "tokens" if data.store is None else data.store)


def _require_form(source: Source, data: schema.Data, pairs: bool) -> None:
    """Raise UserError if the job cannot train on rows of the source's form, or not with its other settings."""
    file, are_pairs = source.files[0].name, source.form == "chosen/rejected"
    if are_pairs and not pairs:
        raise UserError(
            "E-DATA-004",
            f"{file}: preference pairs (chosen, rejected), but the job does not train on preferences",
            why="next-token training does not use rejected answers",
            fix="add preferences: dpo; or train on the chosen answers only: data.columns.completion=chosen",
        )
    if pairs and not are_pairs:
        raise UserError(
            "E-DATA-005",
            f"{file}: the job trains on preferences, but the rows are {source.form}",
            why="a preference is a row with the columns chosen and rejected, and optionally prompt",
            fix="name the columns: data.columns.chosen=NAME data.columns.rejected=NAME",
        )
    if not are_pairs:
        return
    if data.validation and data.validation_by == "rows":
        raise UserError(
            "E-DATA-006",
            "data.validation_by=rows cannot be used with preference pairs",
            why="the log-probabilities of a reference model belong to complete pairs",
            fix="remove data.validation_by: pairs are held out by the hash of their content",
        )
    if data.loss_on == "all" or data.packing != "auto":
        key, value = ("loss_on", "all") if data.loss_on == "all" else ("packing", data.packing)
        raise UserError(
            "E-DATA-007",
            f"data.{key}={value} cannot be used with preference pairs",
            why="the two answers of a pair are compared, so both must be in one row",
            fix=f"remove data.{key}",
        )
    resolve_policy(data.too_long, pairs=True)


def packing_of(data: schema.Data, source: Source) -> str:
    """Return the packing: `pairs` for pairs, else `data.packing`.

    By default, it is `concatenate` for text and for token files without a loss mask, and `whole` for other data.
    """
    if source.form == "chosen/rejected":
        return "pairs"
    if data.packing != "auto":
        return data.packing
    was_text = source.kind in TOKEN_KINDS and "loss_mask" not in source.names
    return "concatenate" if source.form == "text" or was_text else "whole"


def _packed(documents: Documents, packing: str, sequence: int, data: schema.Data, plans: Path) -> PackedRows:
    """Return rows of `sequence` positions. `plans` is the folder for packing plans."""
    if packing == "concatenate":
        return Concatenated(documents, sequence)
    too_long = resolve_policy(data.too_long, pairs=packing == "pairs")
    if packing == "pairs":
        return Pairs(documents, sequence, too_long=too_long)
    return WholeDocuments(documents, sequence, too_long=too_long, plan_folder=plans)


def _open_part(
    name: str,
    part: schema.Part,
    data: schema.Data,
    dialect: Dialect,
    sequence: int,
    vocab: int | None,
    pairs: bool,
    phase: Phase | None,
    reads: StoreReads | None,
    host: tuple[int, int],
) -> CorpusPart:
    source = open_source(part)
    recipe = recipe_of(source, data, dialect, vocab, pairs=pairs)
    folder = tokenize(source, recipe, data, name=name, phase=phase, host=host)
    store = open_store(folder, reads=reads)
    packing = packing_of(data, source)
    plans = store.local_folder / PLANS
    rows = _packed(store.train, packing, sequence, data, plans)
    if data.validation_by == "rows":
        rows, kept = held_out(rows, data.validation)
    else:
        kept = _packed(store.validation, packing, sequence, data, plans) if store.validation else None
    notes = tuple(notes_of(source, recipe, data, dialect.tokenizer))
    return CorpusPart(name, source, store, rows, kept, data.validation, notes, rendering_of(source, recipe, data))


def _in_extents(part: CorpusPart, block_rows: int) -> CorpusPart:
    """Return the part with rows that are read from a bucket in complete blocks of the order `blocks`.

    Blocks are neighbouring tokens only if the documents are concatenated and no rows are held out by their number.
    """
    if block_rows == 1 or not isinstance(part.rows, Concatenated):
        return part
    documents = replace(part.store.train, extent_tokens=block_rows * part.rows.sequence)
    return replace(part, rows=Concatenated(documents, part.rows.sequence))


def _held_out_rows(parts: tuple[CorpusPart, ...]) -> Mixture | None:
    """Return the held-out rows of all parts, or None if the job does not ask for validation.

    Each row counts once, because weights are for training only.

    Raises:
      UserError: the job asks for validation, and no part holds out a row.
    """
    kept = {part.name: part.kept for part in parts if part.kept is not None and len(part.kept)}
    if not kept and (asked := [held for part in parts if (held := part.held_out) is not None]):
        require_held_out(asked, sum(len(part.rows) for part in parts))
    return Mixture(list(kept.values()), None, list(kept)) if kept else None
