"""The form of a row, recognised from its column names, and the column of each role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from forerun.config.column_template import ColumnTemplate, parse_template
from forerun.data.source.column_pairs import (
    column_value,
    named_roles,
    override_text,
    pair_columns,
    partner_fix,
    preference_prompt,
    require_prompt,
    shortened,
    unused_text,
)
from forerun.data.source.rows import RowError
from forerun.errors import did_you_mean

# ---- Templates that build a text or a list of messages from the columns of a row ----


_KINDS = {bool: "true/false", float: "a number with a fraction", list: "a list", dict: "an object", bytes: "bytes"}


@dataclass(frozen=True)
class TextTemplate:
    """A template that builds a text, such as `{question}\\n{answer}`."""

    text: str

    @cached_property
    def _parsed(self) -> ColumnTemplate:
        return parse_template(self.text)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the template reads, in order, each once."""
        return tuple(dict.fromkeys(self._parsed.columns))

    @property
    def plain(self) -> str:
        """The text without columns, with literal braces."""
        return "".join(self._parsed.texts)

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the text of a row. Raise RowError if a cell is missing, or is neither text nor an integer."""
        first, *others = self._parsed.texts
        pieces = [first]
        for column, text in zip(self._parsed.columns, others, strict=True):
            pieces += (_cell(row, column), text)
        return "".join(pieces)


@dataclass(frozen=True)
class MessagesTemplate:
    """Templates that build a list of messages. The role is a fixed text, all other fields are templates."""

    messages: tuple[tuple[str, Mapping[str, TextTemplate]], ...]  # role, and the template of each other field

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the templates read, in order, each once."""
        return tuple(
            dict.fromkeys(column for _, fields in self.messages for one in fields.values() for column in one.columns)
        )

    @property
    def constants(self) -> list[str]:
        """The contents that are the same in every row."""
        return [one.plain for _, fields in self.messages for one in fields.values() if not one.columns]

    def fill(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the messages of a row. Raise RowError if a cell is missing, or is neither text nor an integer."""
        return [
            {"role": role, **{name: one.fill(row) for name, one in fields.items()}} for role, fields in self.messages
        ]


RowTemplate = TextTemplate | MessagesTemplate


def template_of(value: str | Sequence[Mapping[str, str]]) -> RowTemplate | None:
    """Return the template that a value of `data.columns` is, or None if it names one column."""
    if isinstance(value, str):
        found = TextTemplate(value)
        return found if found.columns else None
    return MessagesTemplate(
        tuple(
            (one["role"], {name: TextTemplate(text) for name, text in one.items() if name != "role"}) for one in value
        )
    )


def column_of(value: str) -> str:
    """Return the column that a value of `data.columns` names, if it is not a template."""
    return TextTemplate(value).plain


def _cell(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    kind = "null" if value is None else _KINDS.get(type(value), type(value).__name__)
    raise RowError(
        "E-DATA-121",
        f"column {column!r} holds {kind}, and a template of data.columns needs it"
        if column in row
        else f"no column {column!r} in this row, and a template of data.columns needs it",
        why="a template joins texts and whole numbers",
        fix="fix or delete this row, or skip such rows: data.bad_rows=0.01",
    )


FORMS = {
    "text": ("text",),
    "messages": ("messages",),
    "chosen/rejected": ("chosen", "rejected"),
    "prompt/completion": ("prompt", "completion"),
    "input_ids": ("input_ids",),
    "alpaca": ("instruction", "output"),
    "prompt/completion messages": ("prompt", "completion"),  # at least one of them is a list of messages
}
OPTIONAL = {
    "messages": ("tools",),
    "chosen/rejected": ("prompt", "tools"),
    "input_ids": ("loss_mask",),
    "alpaca": ("input",),
    "prompt/completion messages": ("tools",),
}
SHOWN = {
    "text": "",
    "messages": "chat, ",
    "chosen/rejected": "preference pairs, ",
    "prompt/completion": "prompt and completion, ",
    "input_ids": "already tokenized, ",
    "alpaca": "Alpaca, ",
    "prompt/completion messages": "prompt and completion as messages, ",
}
# Of the value of a column. ShareGPT: messages with from and value.
Shape = Literal["value", "list", "ShareGPT", "integers"]
# Columns that are read as a role if no form fits otherwise.
_OTHER_NAMES = {"messages": ("conversations", "conversation")}
_COMMON_TEXT_NAMES = ("content", "body", "document", "article", "story", "raw_text", "txt")
MISSING_COLUMN = "E-DATA-024"
_PAIR_FORMS = ("prompt/completion", "alpaca")


@dataclass(frozen=True)
class Columns:
    """The form of every row, and the column or the template of the file for each role.

    `names` are the columns of the first row, and `style` is the name of a variant of the form. Both are for the
    display only.
    """

    form: str
    given: Mapping[str, Any]
    names: tuple[str, ...] = ()
    style: str = ""

    @cached_property
    def templates(self) -> dict[str, RowTemplate]:
        """Role to template, for roles of the form that are built from columns."""
        roles = (*FORMS[self.form], *OPTIONAL.get(self.form, ()))
        found = {role: template_of(self.given[role]) for role in roles if role in self.given}
        return {role: one for role, one in found.items() if one is not None}

    def name(self, role: str) -> str:
        """Return the column of the file for a role. For a template, return the key of the job."""
        if role in self.templates:
            return f"data.columns.{role}"
        return column_of(self.given[role]) if role in self.given else role

    @property
    def needed(self) -> dict[str, str]:
        """Role to column, for the columns that every row must have. Roles with a template are not included."""
        return {role: self.name(role) for role in FORMS[self.form] if role not in self.templates}

    @property
    def optional(self) -> dict[str, str]:
        """Role to column, for the columns that a row may have. Roles with a template are not included."""
        return {role: self.name(role) for role in OPTIONAL.get(self.form, ()) if role not in self.templates}

    @property
    def known(self) -> dict[str, str]:
        """Role to column, for required and optional columns without a template."""
        return self.needed | self.optional

    @property
    def read(self) -> list[str]:
        """All columns of the file that are read, each once."""
        built = [column for one in self.templates.values() for column in one.columns]
        return list(dict.fromkeys([*self.known.values(), *built]))

    @property
    def shown(self) -> str:
        """A description for the display, such as `chat, column conversations`."""
        shown = self.form == "alpaca" or "tools" in self.optional
        optional = [name for role, name in self.optional.items() if shown and role != "prompt" and name in self.names]
        built = [column for one in self.templates.values() for column in one.columns]
        required = list(self.needed.values())
        names = list(dict.fromkeys([*required[:1], *optional, *required[1:], *built]))
        words = SHOWN[self.form].replace(", ", f" ({self.style}), ") if self.style else SHOWN[self.form]
        by = f", by the template of data.columns.{next(iter(self.templates))}" if self.templates else ""
        return f"{words}column{'s' if len(names) > 1 else ''} {', '.join(names)}{by}"

    @property
    def unused(self) -> list[str]:
        """Columns of the file that are not read."""
        return [name for name in self.names if name not in self.read]

    @property
    def unused_prompts(self) -> list[str]:
        """Unused columns with the name of a prompt. Messages and token ids contain their prompts."""
        if self.form not in ("text", "chosen/rejected", *_PAIR_FORMS):
            return []
        return list(named_roles(self.unused).prompts)

    def require(self, names: Iterable[str]) -> None:
        """Raise RowError if a needed column is missing in `names`, or if a column to read is in it more than once."""
        names = list(names)
        for name in self.needed.values():
            if name not in names:
                raise _missing(names, name, _row_fix(names, name))
        for role, template in self.templates.items():
            _require_template(names, role, template)
        for name in self.read:
            if names.count(name) > 1:
                raise RowError("E-DATA-023", f"two columns {name!r}", why=shortened(names), fix="rename one of them")


def form_of(names: Iterable[str], given: Mapping[str, Any]) -> str | None:
    """Return the first form whose columns all exist, or None.

    `given` maps roles to columns of the file or to templates. If it contains roles of some forms, only these forms are
    considered.
    """
    existing = set(names)
    for form in _intended(given) or FORMS:
        if all(_exists(given.get(role, role), existing) for role in FORMS[form]):
            return form
    return None


def recognised(
    names: Iterable[str], given: Mapping[str, Any], shapes: Mapping[str, Shape] = MappingProxyType({})
) -> Columns:
    """Return the form of a row with the columns `names`. Raise RowError for the missing column if it has none.

    `shapes` are the shapes of the values of each column, which distinguish texts from lists of messages.
    """
    names = list(names)
    form = form_of(names, given)
    if form is None and not _intended(given):
        given = {**given, **(_likely_columns(names) or {})}
        form = form_of(names, given)
    if form == "text" and "text" in given and template_of(given["text"]) is None:
        require_prompt(names, column_of(given["text"]))
    if form == "chosen/rejected" and "prompt" not in given and "prompt" not in names:
        prompt = preference_prompt(names)
        given = given if prompt is None else {**given, "prompt": prompt}
    if form is None:
        intended = next(iter(_intended(given)), "text")
        role = next(role for role in FORMS[intended] if not _exists(given.get(role, role), set(names)))
        template = template_of(given[role]) if role in given else None
        if template is not None:
            _require_template(names, role, template)
        name = column_of(given[role]) if role in given else role
        raise _missing(names, name, _missing_fix(names, role, name, given, shapes))
    found = Columns(form, dict(given), tuple(names))
    if form == "prompt/completion" and any(shapes.get(name, "value") != "value" for name in found.needed.values()):
        form = "prompt/completion messages"
    style = (
        "ShareGPT" if form == "messages" and "ShareGPT" in (shapes.get(one) for one in found.needed.values()) else ""
    )
    for template in found.templates.values():
        _require_no_column_name(names, template)
    return Columns(form, found.given, found.names, style)


def shape_of(value: Any) -> Shape:
    """Return the shape of a value in a row."""
    if type(value) is not list:
        return "value"
    if value and type(value[0]) is int:
        return "integers"
    return "ShareGPT" if value and type(value[0]) is dict and "role" not in value[0] and "from" in value[0] else "list"


def _likely_columns(names: Sequence[str]) -> dict[str, str] | None:
    """Return `data.columns` for names that usually have one meaning, or None. Raise RowError for several meanings."""
    for role, synonyms in _OTHER_NAMES.items():
        synonym = next((name for name in synonyms if name in names), None)
        if synonym is not None:
            return {role: column_value(synonym)}
    return pair_columns(names)


def _intended(given: Mapping[str, Any]) -> list[str]:
    """Return the forms that have a required role in `given`."""
    return [form for form, roles in FORMS.items() if any(role in given for role in roles)]


def _exists(value: Any, existing: set[str]) -> bool:
    """Return whether all columns of a value of `data.columns` exist."""
    template = template_of(value)
    return column_of(value) in existing if template is None else set(template.columns) <= existing


def _require_template(names: Sequence[str], role: str, template: RowTemplate) -> None:
    """Raise RowError if a column of a template does not exist."""
    for column in template.columns:
        if column not in names:
            near = did_you_mean(column, names)
            raise RowError(
                "E-DATA-120",
                f"no column {column!r}, which data.columns.{role} names",
                why=f"the columns of the file: {', '.join(names) or 'none'}",
                fix=f"did you mean {{{near}}}?" if near else f"name existing columns in data.columns.{role}",
            )


def _require_no_column_name(names: Sequence[str], template: RowTemplate) -> None:
    """Raise RowError if the content of a message is the name of a column without braces, which is a mistake."""
    for text in template.constants if isinstance(template, MessagesTemplate) else ():
        if text in names:
            raise RowError(
                "E-DATA-122",
                f"data.columns.messages: the content {text!r} is a fixed text, and the file has a column of this name",
                why="a content without braces is the same text in every row",
                fix=f'write content: "{{{text}}}" for the column',
            )


def _missing(names: Sequence[str], name: str, fix: str) -> RowError:
    return RowError(MISSING_COLUMN, f"no column {name!r}", why=f"its columns: {shortened(names) or 'none'}", fix=fix)


def _row_fix(names: Sequence[str], name: str) -> str:
    """Return the fix for a row, or a file of several, that lacks a column of the source's form."""
    near = did_you_mean(name, names)
    correct = f"rename {near!r} to {name!r} in this row" if near else f"add {name!r} to this row, or delete the row"
    return f"{correct}; files with other columns than the first need another part of data.mixture"


def _missing_fix(
    names: Sequence[str], role: str, name: str, given: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> str:
    """Return the fix for a file without a form. It proposes columns of `names` that are likely intended.

    The fix names every column that the proposal does not use, so that no content is lost unnoticed.
    """
    is_named = role in given  # by the job, so that a column of this name was expected
    near = did_you_mean(name, names) if is_named or role != "text" else None
    if near and is_named:
        return f"did you mean {override_text(role, column_value(near))}?{unused_text(names, [near])}"
    if role != "text":
        named_columns = [column for value in given.values() for column in _columns_of(value)]
        partner = (
            partner_fix(names, role, named_columns)
            if role in ("prompt", "completion", "instruction", "output")
            else None
        )
        return partner or f"add the {role} column: data.columns.{role}=NAME, where NAME is one of: {shortened(names)}"
    lists = {name: shape for name, shape in shapes.items() if shape != "value"}
    if len(lists) == 1:
        ((column, shape),) = lists.items()
        proposed = "input_ids" if shape == "integers" else "messages"
        return f"try {override_text(proposed, column_value(column))}{unused_text(names, [column])}"
    texts = [name for name in names if shapes.get(name, "value") == "value"]
    likely = next((name for name in _COMMON_TEXT_NAMES if name in texts), None) or did_you_mean("text", texts)
    if likely or len(texts) == 1:
        column = likely or texts[0]
        return f"try {override_text('text', column_value(column))}{unused_text(names, [column])}"
    return (
        "name the columns: data.columns.text=NAME for plain text, or data.columns.prompt=NAME "
        f"data.columns.completion=NAME for prompts and answers; NAME is one of: {shortened(names)}"
    )


def _columns_of(value: Any) -> Sequence[str]:
    """Return the columns of the file that a value of `data.columns` reads."""
    template = template_of(value)
    return (column_of(value),) if template is None else template.columns
