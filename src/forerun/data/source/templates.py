"""Templates that build a text or a list of messages from the columns of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from forerun.config.column_template import ColumnTemplate, parse_template
from forerun.data.source.rows import RowError

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
