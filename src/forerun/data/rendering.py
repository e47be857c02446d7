"""How the rows of a source become text: with a chat template or as plain text, and notes about it for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forerun.config import schema
from forerun.data.chat_template import job_template
from forerun.data.source.kinds import TOKEN_KINDS
from forerun.data.source.plain import LIKELY_SEPARATOR, likely_separators
from forerun.data.source.sources import Source
from forerun.data.tokenizer import Tokenizer
from forerun.data.tokens.exchange import CONVERSATION_FORMS, PROMPT_FORMS
from forerun.data.tokens.recipe import Recipe
from forerun.data.turns import turn_end
from forerun.errors import UserError

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
