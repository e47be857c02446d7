"""Values of `data.columns`: the name of a column, a template of columns, or a list of messages made of templates.

A template such as `{question}\n{answer}` names columns and nothing else. It has no format specifications, attributes,
indexes or conversions: the text between the braces is always the name of a column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import JobValueError

COLUMNS = (
    "text", "messages", "prompt", "completion", "chosen", "rejected", "input_ids", "instruction", "input", "output",
    "tools",
)  # fmt: skip
TEMPLATE_ROLES = ("text", "prompt", "completion", "chosen", "rejected", "instruction", "input", "output")
_PIECE = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]")


@dataclass(frozen=True)
class ColumnTemplate:
    """A parsed template: texts with one column between each of them. `texts` has one entry more than `columns`."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]


def parse_template(text: str) -> ColumnTemplate:
    """Return the parsed template. `{{` and `}}` are literal braces.

    Raises:
      ValueError: a brace has no partner, or no name is between the braces.
    """
    texts: list[str] = [""]
    columns: list[str] = []
    at = 0
    for found in _PIECE.finditer(text):
        texts[-1] += text[at : found.start()]
        at, piece = found.end(), found[0]
        if piece in ("{{", "}}"):
            texts[-1] += piece[0]
        elif len(piece) > 2:
            columns.append(piece[1:-1])
            texts.append("")
        else:
            raise ValueError(f"character {found.start() + 1} is {piece!r}")
    texts[-1] += text[at:]
    return ColumnTemplate(tuple(texts), tuple(columns))


def check_columns(columns: Any) -> Any:
    """Return `columns` if all its roles and values are allowed, else raise JobValueError."""
    if not isinstance(columns, Mapping):
        return columns  # the schema reports the wrong type
    unknown = sorted(str(role) for role in set(columns) - set(COLUMNS))
    if unknown:
        raise JobValueError(
            "E-JOB-025", f"data.columns: unknown {unknown[0]!r}", fix=f"use one of these: {', '.join(COLUMNS)}"
        )
    for role, value in columns.items():
        if role == "messages" and isinstance(value, list | tuple):
            _check_messages(value)
        elif isinstance(value, str):
            _parsed(value, f"data.columns.{role}", may_have_columns=role in TEMPLATE_ROLES)
        elif isinstance(value, Mapping):
            raise JobValueError(
                "E-JOB-060",
                f"data.columns.{role} is a section of keys, not a text",
                fix=f"put a template in quotes, as in data.columns.{role}='\"{{question}} {{answer}}\"'",
            )
        elif isinstance(value, list | tuple):
            raise JobValueError(
                "E-JOB-061",
                f"data.columns.{role} is a list: only data.columns.messages can be a list of messages",
                fix="write the name of a column, or a template in quotes",
            )
    return columns


def _check_messages(messages: Any) -> None:
    """Raise JobValueError unless each message has a role and a content, and an answer contains a column."""
    answers = 0
    for at, message in enumerate(messages):
        where = f"data.columns.messages: message {at + 1}"
        texts = isinstance(message, Mapping) and all(isinstance(value, str) for value in message.values())
        if not texts or not message.get("role") or "content" not in message:
            raise JobValueError(
                "E-JOB-062",
                f"{where} needs a role and a content",
                fix='write for example {role: user, content: "{question}"}',
            )
        found = [_parsed(value, f"{where}, {key}").columns for key, value in message.items() if key != "role"]
        answers += message["role"] in ("assistant", "gpt") and any(found)
    if not answers:
        raise JobValueError(
            "E-JOB-063",
            "data.columns.messages: no message of the role assistant contains a column, so all rows have the same "
            "answer",
            fix='write for example {role: assistant, content: "{answer}"}',
        )


def _parsed(text: str, where: str, *, may_have_columns: bool = True) -> ColumnTemplate:
    try:
        found = parse_template(text)
    except ValueError as error:
        raise JobValueError(
            "E-JOB-064",
            f"{where} is not a template: {error}",
            fix="write a column as {name}, and a literal brace as {{ or }}",
        ) from None
    if found.columns and not may_have_columns:
        raise JobValueError(
            "E-JOB-065", f"{where} is a list, so it cannot be a template of texts", fix="write the name of its column"
        )
    return found
