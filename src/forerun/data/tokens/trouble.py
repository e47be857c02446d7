"""Why a row is no document, before it is known where the row stands."""

from __future__ import annotations

from typing import Any, NamedTuple


class Trouble(NamedTuple):
    what: str
    why: str
    fix: str


EMPTY = Trouble("the text is empty", why="it gives no token", fix="take the row out, or allow it: data.bad_rows=1")
FORGED = Trouble(
    "a special token stands in the text",
    why="this tokenizer has no plain spelling for it",
    fix="take it out of the text, or allow it: data.special_tokens=true",
)
HALF = Trouble(
    "the text has half of a surrogate pair",
    why="it cannot be written as UTF-8",
    fix="write the data again with whole characters",
)
DEEP = Trouble("it is nested too deeply", why="lists in lists a thousand times", fix="take the row out")


def said(value: Any) -> str:
    """A value for a message, not more than a line of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def is_half(text: str) -> bool:
    """Whether there is half of a surrogate pair in it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
