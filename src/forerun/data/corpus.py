"""The data of a job: its sources, tokens and packed rows, with counts and warnings for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.config import schema
from forerun.data.chat_template import job_template, template_origin, thinking_variables, turn_end
from forerun.data.documents import Documents
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.held_out import HeldOut, Subset, held_out, packer_of, require_held_out
from forerun.data.order.mixture import Mixture
from forerun.data.order.packing import resolve_policy
from forerun.data.order.pairs import Pairs, describe_too_long
from forerun.data.order.rows import PackedRows
from forerun.data.order.whole_documents import WholeDocuments
from forerun.data.reads.store_reads import StoreReads, job_reads
from forerun.data.source.identity import cache_folder
from forerun.data.source.kinds import TOKEN_KINDS
from forerun.data.source.plain import LIKELY_SEPARATOR, likely_separators
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import Tokenizer
from forerun.data.tokens.build import BuildProgress, Limits, build
from forerun.data.tokens.document import CONVERSATION_FORMS, PROMPT_FORMS
from forerun.data.tokens.recipe import Recipe, recipe_for
from forerun.data.tokens.store import TokenStore, open_store
from forerun.data.tokens.worker_pool import Pool, StartEngine
from forerun.errors import UserError
from forerun.reporter import Phase
from forerun.storage.address import Address
from forerun.storage.folder import Folder
from forerun.storage.open_folder import folder_at
from forerun.units import Count

# ---- How the rows of a source become text, and notes about it for the user ----


FIRST_DOCUMENTS = 256  # of a file of token ids, whose last ids are compared with the end token
MANY_SEPARATORS = 3  # at the start of a file that is one document; from this number on, a note is printed


def applies_template(form: str, data: schema.Data, model_template: str | None) -> bool:
    """Return whether plain texts of this form become messages of a conversation.

    By default, prompts and completions do if the job or the model has a chat template. Preference pairs do only if the
    job sets `data.apply_template`.
    """
    if form in PROMPT_FORMS:
        has_template = data.chat_template is not None or model_template is not None
        return has_template if data.apply_template is None else data.apply_template
    return bool(data.apply_template) and form == "chosen/rejected"


def required_template(source: Source, data: schema.Data, model_template: str | None, *, applied: bool) -> str | None:
    """Return the job's chat template, or else the model's. Raise UserError if one is needed and both are missing."""
    if data.chat_template is not None:
        return job_template(data)
    needed = "conversations" if source.form in CONVERSATION_FORMS else "data.apply_template" if applied else None
    if model_template is None and needed:
        raise UserError(
            "E-DATA-009",
            f"{source.files[0].name}: {needed}, but no chat template",
            why="the model has no chat template, so forerun cannot convert a conversation to text",
            fix="set data.chat_template=chatml, or the path of a Jinja file",
        )
    return model_template


def rendering_of(source: Source, recipe: Recipe, data: schema.Data) -> str:
    """Return how rows become text, for the display. Return "" for texts, and for conversations without data.system."""
    if source.kind in TOKEN_KINDS:
        last = _last_ids(source)
        return f"{last[recipe.eos]} of the first {last.total()} documents end with the end token {recipe.eos}, " + (
            "which is not added again" if last[recipe.eos] == last.total() else "which is added to the others"
        )
    form = source.form
    template = "the model's chat template" if data.chat_template is None else "data.chat_template"
    template += "" if recipe.system is None else " and data.system"
    if form in PROMPT_FORMS and not recipe.apply_template:
        return "as plain text" if form == "prompt/completion" else "as Alpaca's plain prompt"
    if form in PROMPT_FORMS and data.apply_template is None:
        return f"with {template} (data.apply_template=false: plain text)"
    return f"with {template}" if form in PROMPT_FORMS or recipe.system is not None else ""


def notes_of(source: Source, recipe: Recipe, data: schema.Data, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield notes about settings that are probably a mistake, each with the key that changes it."""
    for key in ("chat_template", "system", "thinking", "ignored_fields"):
        if getattr(data, key) not in (None, []) and recipe.template is None:
            yield f"data.{key} is not used: these rows are {_described(source, data)}"
    if data.apply_template and not (source.form in PROMPT_FORMS or source.form == "chosen/rejected"):
        yield f"data.apply_template changes nothing: these rows are {source.form}, not prompt and completion"
    if source.form == "text" and {"instruction", "output"} <= set(source.unused):
        yield (
            "the rows are read as text, because they have the column text, and all tokens have loss: "
            "data.columns.instruction=instruction reads their instruction, input and output as Alpaca instead"
        )
    elif source.unused_prompts:
        yield (
            f"column {', '.join(source.unused_prompts)} is not used, although it has the name of a prompt: the "
            f"rows are read as {source.form}; name all columns to read in data.columns, or rename this one if it is no "
            "prompt"
        )
    if source.kind == "text" and source.separator is None:
        found = likely_separators(source.files[0])
        if found >= MANY_SEPARATORS:
            yield (
                f"{source.files[0].name} is one document, and {LIKELY_SEPARATOR} occurs in it, at least {found} times: "
                f"data.separator='{LIKELY_SEPARATOR}' makes a document of each part"
            )
    if source.kind in TOKEN_KINDS:
        yield from _end_notes(_last_ids(source), recipe.eos)
    if recipe.template is not None and data.chat_template:
        for text in turn_end(recipe.template, recipe.special, tokenizer).stop:
            yield (
                f"a turn ends with {text!r}, which this tokenizer spells out in several tokens: forerun ends an answer "
                "at that text, and transformers needs stop_strings for it"
            )


def _last_ids(source: Source) -> Counter[int]:
    """Return how many of the first documents end with each id."""
    return Counter(int(row.values["input_ids"][-1]) for row in source.first_rows(FIRST_DOCUMENTS))


def _end_notes(last: Counter[int], end: int) -> Iterator[str]:
    """Yield a note if documents end with another common id, which is probably the end token of another tokenizer."""
    ((common, count),) = last.most_common(1) or [(end, 0)]
    if common != end and count > 2 and count > last.total() // 2:
        yield (
            f"{count} of the first {last.total()} documents end with the token {common}, not with the end token {end}: "
            f"they get both, so check that data.tokenizer is the tokenizer that made the files"
        )


def _described(source: Source, data: schema.Data) -> str:
    plain = source.form in PROMPT_FORMS and data.apply_template is False
    return f"{source.form}{', joined as plain text by data.apply_template=false' if plain else ''}"


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
        """Warnings about probable mistakes in each part."""
        held = [part.held_out for part in self.parts]
        far = [f"{part.name}: {one.warning}" for part, one in zip(self.parts, held, strict=True) if one and one.is_far]
        notes = [f"{part.name}: {note}" for part in self.parts for note in part.notes]
        return [*far, *notes]

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
      UserError: a source cannot be read, its form does not match the job, or no row is held out although the job asks
        for validation.
    """
    reads = job_reads(data) if data.store is not None and Address.of(data.store).is_bucket else None
    opened = []
    for name, part in data.parts.items():
        source = open_source(part)
        recipe = recipe_of(source, data, dialect, vocab, pairs=pairs)
        folder = tokenize(source, recipe, data, name=name, phase=phase, host=host)
        store = open_store(folder, reads=reads)
        packing, plans = packing_of(data, source), store.local_folder / PLANS
        rows = _packed(store.train, packing, sequence, data, plans)
        if data.validation_by == "rows":
            rows, kept = held_out(rows, data.validation)
        else:
            kept = _packed(store.validation, packing, sequence, data, plans) if store.validation else None
        notes = tuple(notes_of(source, recipe, data, dialect.tokenizer))
        text_form = rendering_of(source, recipe, data)
        opened.append(CorpusPart(name, source, store, rows, kept, data.validation, notes, text_form))
    parts = tuple(opened)
    weights = [part.weight for part in data.mixture.values() if part.weight is not None]
    row_bytes = max(part.store.train.token_bytes for part in parts) * sequence if data.shuffle == "blocks" else None
    mixture = Mixture([part.rows for part in parts], weights or None, list(data.parts), row_bytes=row_bytes)
    if mixture.block_orders:
        parts = tuple(_in_extents(part, mixture.block_rows(n)) for n, part in enumerate(parts))
        mixture = Mixture([part.rows for part in parts], weights or None, list(data.parts), row_bytes=row_bytes)
    # Each held-out row counts once, because weights are for training only.
    validation = {part.name: part.kept for part in parts if part.kept is not None and len(part.kept)}
    if not validation and (asked := [held for part in parts if (held := part.held_out) is not None]):
        require_held_out(asked, sum(len(part.rows) for part in parts))
    held_out_rows = Mixture(list(validation.values()), None, list(validation)) if validation else None
    return Corpus(dialect.tokenizer, parts, mixture, held_out_rows, reads)


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
        special=dict(dialect.special) | switch if chat else {},
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


def _in_extents(part: CorpusPart, block_rows: int) -> CorpusPart:
    """Return the part with rows that are read from a bucket in complete blocks of the order `blocks`.

    Blocks are neighbouring tokens only if the documents are concatenated and no rows are held out by their number.
    """
    if block_rows == 1 or not isinstance(part.rows, Concatenated):
        return part
    documents = replace(part.store.train, extent_tokens=block_rows * part.rows.sequence)
    return replace(part, rows=Concatenated(documents, part.rows.sequence))
