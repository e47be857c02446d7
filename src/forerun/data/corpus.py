"""Opening the job's data: sources, tokens and rows in one call, with the counts a user wants to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from forerun.config import schema
from forerun.data.chat_template import job_template, template_origin
from forerun.data.documents import Documents
from forerun.data.order.concatenated import Concatenated
from forerun.data.order.mixture import Mixture
from forerun.data.order.pairs import Pairs, short_of
from forerun.data.order.permutation import ORDER
from forerun.data.order.rows import PackedRows
from forerun.data.order.subset import Subset, held_out, packer_of
from forerun.data.order.whole import Whole
from forerun.data.shares import HeldOut
from forerun.data.source.identity import cache_folder
from forerun.data.source.plain import LIKELY_SEPARATOR, likely_separators
from forerun.data.source.sources import Source, open_source
from forerun.data.tokenizer import Tokenizer
from forerun.data.tokens.build import Limits, Progress, build
from forerun.data.tokens.recipe import Recipe, recipe_for
from forerun.data.tokens.store import Store, open_store
from forerun.data.turns import turn_end
from forerun.errors import UserError
from forerun.units import Count

OnProgress = Callable[[str, Progress], None]
CHAT_FORMS = ("messages", "chosen/rejected")
PLANS = "rows"  # folder of packing plans, inside a store's
MANY_SEPARATORS = 3  # in the beginning of a file that is one document


@dataclass(frozen=True)
class Dialect:
    """How the model reads: its tokenizer, and how a conversation becomes text."""

    tokenizer: Tokenizer
    template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One source, its tokens and its rows."""

    name: str
    source: Source
    store: Store
    rows: PackedRows
    kept: PackedRows | None = None  # rows that are held out for validation
    wanted: float = 0.0  # the share that the job asks to hold out
    notes: tuple[str, ...] = ()  # what is probably not meant, for warnings

    @property
    def plans(self) -> list[Whole]:
        """Return the rows whose packing plan is stored with the tokens."""
        packers = {id(rows): rows for rows in (packer_of(rows) for rows in (self.rows, self.kept) if rows is not None)}
        return [rows for rows in packers.values() if isinstance(rows, Whole)]

    @property
    def held_out(self) -> HeldOut | None:
        """Return what is held out for validation; None if the job asks for nothing."""
        if not self.wanted:
            return None
        train, kept, held = self.store.train, self.store.validation, self.kept
        if isinstance(self.rows, Subset) or isinstance(held, Subset):
            mine = 0 if held is None else len(held)
            count = len(packer_of(self.rows))
            return HeldOut(self.wanted, "rows", mine, count, mine / count)
        sides, word = (2, "pairs") if isinstance(self.rows, Pairs) else (1, "documents")
        mine, tokens = (0, 0) if kept is None else (len(kept), kept.tokens)
        whole = train.tokens + tokens
        return HeldOut(self.wanted, word, mine // sides, (len(train) + mine) // sides, tokens / whole)

    @property
    def checked(self) -> bool:
        """Whether every file has checksums of its blocks; stores of earlier versions of forerun have none."""
        return self.store.checked and all(rows.checked for rows in self.plans)

    @property
    def line(self) -> str:
        """`3 files, jsonl, column text  12 documents  1.02M tokens  996 rows of 1024  0.0% padding`, and what else
        became of documents."""
        report, store = self.rows.report, self.store
        word = "pair" if isinstance(self.rows, Pairs) else "document"
        said = [
            self.source.recognised,
            f"{report.documents} {word}{'' if report.documents == 1 else 's'}",
            f"{Count(report.tokens)} tokens",
            f"{report.rows} rows of {report.sequence}",
            f"{report.padding_share:.1%} padding",
        ]
        if report.too_long and isinstance(self.rows, Pairs):
            said.append(short_of(report))
        elif report.too_long and isinstance(packer_of(self.rows), Whole):
            said.append(f"{report.too_long} longer than a row: {report.became.replace('_', ' ')}")
        if store.bad:
            said.append(f"{store.bad} bad rows passed over")
        if (held := self.held_out) is not None and held.held:
            said.append(f"validation: {held.counted}")
        return "  ".join(said)


@dataclass(frozen=True)
class Corpus:
    """All data of a job, ready to be cut into batches."""

    tokenizer: Tokenizer
    parts: tuple[Part, ...]
    rows: Mixture
    kept: Mixture | None = None  # for validation

    @cached_property
    def digest(self) -> str:
        """Of the tokens, their packing and mixture, and of the order in which they come."""
        return f"{self.rows.digest} {ORDER}"

    @property
    def largest(self) -> int:
        """The largest token id of all."""
        return max(part.store.train.largest for part in self.parts)

    @property
    def warnings(self) -> list[str]:
        """Return what is probably not meant in each part, and the parts whose damage would go unnoticed."""
        held = [part.held_out for part in self.parts]
        far = [f"{part.name}: {one.warning}" for part, one in zip(self.parts, held, strict=True) if one and one.is_far]
        notes = [f"{part.name}: {note}" for part in self.parts for note in part.notes]
        unchecked = [
            f"{part.name}: {part.store.folder} was written without checksums of its blocks, so damaged bytes would "
            "change the run silently: forerun data JOB --verify compares its files and adds the checksums"
            for part in self.parts
            if not part.checked
        ]
        return [*far, *notes, *unchecked]

    def lines(self) -> list[str]:
        """What was found, for the display: one line, or one for each part of a mixture."""
        if len(self.parts) == 1:
            return [self.parts[0].line]
        seen = zip(self.parts, self.rows.passes, strict=True)
        return [f"{part.name}: {part.line}  {passes:.3g} passes an epoch" for part, passes in seen]


def open_corpus(
    data: schema.Data,
    dialect: Dialect,
    *,
    sequence: int,
    vocab: int | None = None,
    pairs: bool = False,
    on_progress: OnProgress | None = None,
) -> Corpus:
    """Every source of `data`, tokenized unless that was done before, in rows of `sequence`.

    `vocab` is the model's, if it is known: ids that come from the user's own tokenizing are held to it. `pairs`: the
    job learns preferences, and from nothing else.
    """
    parts = tuple(
        _opened(name, part, data, dialect, sequence, vocab, pairs, on_progress) for name, part in data.parts.items()
    )
    weights = [part.weight for part in data.mixture.values() if part.weight is not None]
    rows = Mixture([part.rows for part in parts], weights or None, list(data.parts))
    return Corpus(dialect.tokenizer, parts, rows, _kept(parts))


def tokenize(
    source: Source,
    recipe: Recipe,
    data: schema.Data,
    *,
    shard: tuple[int, int] = (0, 1),
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """The folder of the source's tokens, made by worker processes if they are not there yet."""
    return build(
        source,
        recipe,
        store_root(data),
        workers=data.workers,
        shard=shard,
        limits=Limits(data.bad_rows, data.bad_files),
        progress=on_progress,
    )


def recipe_of(
    source: Source, data: schema.Data, dialect: Dialect, vocab: int | None = None, *, pairs: bool = False
) -> Recipe:
    """How the rows of `source` become tokens; a form that the job does not learn from is refused."""
    _require_form(source, data, pairs)
    given = source.form == "input_ids"
    if given and vocab is None and data.tokenizer is None and dialect.tokenizer.path == "bytes":
        raise UserError(
            f"{source.files[0].name}: token ids, and no tokenizer or vocabulary to hold them to",
            why="data.tokenizer and model.vocab are both open",
            fix="name the tokenizer that made them: data.tokenizer=PATH/tokenizer.json",
        )
    applied = applies_template(source.form, data)
    chat = source.form in CHAT_FORMS or applied
    return recipe_for(
        dialect.tokenizer,
        vocab=vocab if given else None,
        template=_template(source, data, dialect) if chat else None,
        special=dict(dialect.special) if chat else None,
        loss_on=data.loss_on,
        special_tokens=data.special_tokens,
        validation=data.validation if data.validation_by == "documents" else 0.0,
        template_origin=template_origin(data) if chat else None,
        apply_template=applied,
    )


def applies_template(form: str, data: schema.Data) -> bool:
    """Return whether plain texts of this form become messages."""
    return bool(data.apply_template) and form in ("prompt/completion", "chosen/rejected")


def store_root(data: schema.Data) -> Path:
    if data.store is not None:
        return Path(data.store)
    return cache_folder() / "tokens"


def _require_form(source: Source, data: schema.Data, pairs: bool) -> None:
    file, are_pairs = source.files[0].name, source.form == "chosen/rejected"
    if are_pairs and not pairs:
        raise UserError(
            f"{file}: preference pairs (chosen, rejected), and the job does not learn preferences",
            why="next-token training has no use for a rejected answer",
            fix="add preferences: dpo; or learn the chosen answers alone: data.columns.completion=chosen",
        )
    if pairs and not are_pairs:
        raise UserError(
            f"{file}: the job learns preferences, and the rows are {source.form}",
            why="a preference is a row with the columns chosen and rejected, and perhaps prompt",
            fix="name the columns: data.columns.chosen=NAME data.columns.rejected=NAME",
        )
    if not are_pairs:
        return
    if data.validation and data.validation_by == "rows":
        raise UserError(
            "data.validation_by=rows does not go with preference pairs",
            why="the figures of a reference model belong to complete pairs",
            fix="remove data.validation_by: pairs are held out by the hash of their content",
        )
    if data.loss_on == "all" or data.packing != "auto":
        key, value = ("loss_on", "all") if data.loss_on == "all" else ("packing", data.packing)
        raise UserError(
            f"data.{key}={value} does not go with preference pairs",
            why="the two answers of a pair are compared, and stand in one row",
            fix=f"remove data.{key}",
        )
    if data.too_long in ("split", "keep_start"):
        how = "split" if data.too_long == "split" else "cut at its end"
        raise UserError(
            f"data.too_long={data.too_long}: a pair cannot be {how}",
            why="both answers stand whole in one row, or they could not be compared",
            fix="data.too_long=keep_end (the default: the shared prompt loses its start), drop or stop",
        )


def packing_of(data: schema.Data, form: str) -> str:
    """`pairs`, `concatenate` or `whole`: by what the rows are, or the job's."""
    if form == "chosen/rejected":
        return "pairs"
    if data.packing != "auto":
        return data.packing
    return "concatenate" if form == "text" else "whole"


def packed(documents: Documents, packing: str, sequence: int, data: schema.Data, plans: Path | None) -> PackedRows:
    if packing == "concatenate":
        return Concatenated(documents, sequence)
    if packing == "pairs":
        policy = data.too_long
        return Pairs(documents, sequence, too_long=policy if policy in ("drop", "stop") else "keep_end")
    policy = data.too_long
    return Whole(documents, sequence, too_long="split" if policy == "auto" else policy, plan_folder=plans)


def _opened(
    name: str,
    part: schema.Part,
    data: schema.Data,
    dialect: Dialect,
    sequence: int,
    vocab: int | None,
    pairs: bool,
    on_progress: OnProgress | None,
) -> Part:
    source = open_source(part)
    recipe = recipe_of(source, data, dialect, vocab, pairs=pairs)
    report = (lambda progress: on_progress(name, progress)) if on_progress else None
    folder = tokenize(source, recipe, data, on_progress=report)
    store = open_store(folder)
    packing = packing_of(data, source.form)
    rows = packed(store.train, packing, sequence, data, folder / PLANS)
    if data.validation_by == "rows":
        rows, kept = held_out(rows, data.validation)
    else:
        kept = packed(store.validation, packing, sequence, data, folder / PLANS) if store.validation else None
    notes = tuple(_notes(source, recipe, data, dialect))
    return Part(name, source, store, rows, kept, data.validation, notes)


def _notes(source: Source, recipe: Recipe, data: schema.Data, dialect: Dialect) -> Iterator[str]:
    """Yield what the user probably did not mean, each with the key that changes it."""
    template = "data.chat_template" if data.chat_template else "the model's chat template" if dialect.template else None
    if source.form == "prompt/completion" and template and data.apply_template is None:
        yield (
            f"prompts and completions are joined as plain text, without {template}, which chat applies to every "
            "message: data.apply_template=true applies it here too, =false keeps plain text without this warning"
        )
    elif data.chat_template and recipe.template is None:
        yield f"data.chat_template is not used: these rows are {source.form}"
    if data.apply_template and not applies_template(source.form, data):
        yield f"data.apply_template changes nothing: these rows are {source.form}, not prompt and completion"
    if source.kind == "text" and source.separator is None:
        found = likely_separators(source.files[0])
        if found >= MANY_SEPARATORS:
            yield (
                f"{source.files[0].name} is one document, and {LIKELY_SEPARATOR} occurs in it, at least {found} times: "
                f"data.separator='{LIKELY_SEPARATOR}' makes a document of each part"
            )
    if recipe.template is not None and data.chat_template:
        for text in turn_end(recipe.template, recipe.special, dialect.tokenizer).stop:
            yield (
                f"a turn ends with {text!r}, which this tokenizer spells out in several tokens: forerun ends an answer "
                "at that text, and transformers needs stop_strings for it"
            )


def _kept(parts: tuple[Part, ...]) -> Mixture | None:
    """Every document kept back counts once, whatever the parts' weights."""
    kept = {part.name: part.kept for part in parts if part.kept is not None and len(part.kept)}
    return Mixture(list(kept.values()), None, list(kept)) if kept else None


def _template(source: Source, data: schema.Data, dialect: Dialect) -> str | None:
    if data.chat_template is not None:
        return job_template(data)
    needed = "conversations" if source.form == "messages" else "data.apply_template" if data.apply_template else None
    if dialect.template is None and needed:
        raise UserError(
            f"{source.files[0].name}: {needed}, and no chat template",
            why="the model brings none, so nothing says how a conversation becomes text",
            fix="data.chat_template=chatml, or the path of a Jinja file",
        )
    return dialect.template
