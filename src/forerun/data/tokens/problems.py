"""Problems of rows that cannot become documents. The caller adds the place of the row."""

from __future__ import annotations

from typing import Any

from forerun.errors import Problem

EMPTY = Problem(
    "E-DATA-106", "the text is empty", why="it gives no token", fix="remove the row, or allow it: data.bad_rows=1"
)
FORGED = Problem(
    "E-DATA-107",
    "the text contains a special token",
    why="this tokenizer cannot encode it as plain text",
    fix="remove it from the text, or allow it: data.special_tokens=true",
)
HALF = Problem(
    "E-DATA-108",
    "the text has half of a surrogate pair",
    why="it cannot be written as UTF-8",
    fix="write the data again with complete characters",
)
DEEP = Problem(
    "E-DATA-109",
    "it is nested too deeply",
    why="lists or objects have about a thousand levels",
    fix="remove the row",
)


def said(value: Any) -> str:
    """Return the repr of a value for a message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text contains half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
