"""Marks in the texts of messages: unused characters, whose places in a rendered text show where each message is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of a message with the thoughts of the assistant
_FIELDS = ("content", *THOUGHTS, "tool_calls")  # fields of a message whose texts get marks
_NOT_MARKED = ("id", "type", "tool_call_id")  # keys inside these fields that templates compare
_MARKS = range(0x100000, 0x10FFFE)  # private-use characters
Owner = tuple[int, Any, bool]


class UnclearError(Exception):
    """The assistant's part of the text cannot be determined."""


def unused(text: str) -> Iterator[str]:
    """Yield private-use characters that do not occur in the text."""
    taken = set(text)
    return (chr(code) for code in _MARKS if chr(code) not in taken)


def marked_messages(
    messages: list[Any], free: Iterator[str], *, names: bool = True
) -> tuple[list[Any], dict[str, Owner]]:
    """Return the messages with a mark in each text, and the owner of each mark.

    An owner is the number of the message, its field, and whether the text is a name. The field of a call of a tool is
    its number in the list of calls.
    """
    owners: dict[str, Owner] = {}

    def mark(value: Any, owner: Owner) -> Any:
        if isinstance(value, str):
            place = _place_of_mark(value)
            if place is None:
                return value
            character = next(free, None)
            if character is None:
                raise UnclearError("it has too many texts")
            owners[character] = owner
            return value[:place] + character + value[place:]
        if isinstance(value, list):
            return [mark(inner, owner) for inner in value]
        if isinstance(value, dict):
            skipped = _NOT_MARKED if names else (*_NOT_MARKED, "name")
            return {
                key: inner if key in skipped else mark(inner, (*owner[:2], owner[2] or key == "name"))
                for key, inner in value.items()
            }
        return value

    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UnclearError(f"message {number + 1} is not an object")
        changed = dict(message)
        for field in _FIELDS:
            value = changed.get(field)
            if field == "tool_calls" and isinstance(value, list):
                changed[field] = [mark(call, (number, at, False)) for at, call in enumerate(value)]
            elif value is not None:
                changed[field] = mark(value, (number, field, False))
        found.append(changed)
    return found, owners


def without_marks(rendered: str, owners: Iterable[str]) -> tuple[str, dict[str, list[int]]]:
    """Return the text without marks, and the places of each mark in it."""
    known, places, pieces = set(owners), dict[str, list[int]](), list[str]()
    length = start = 0
    for at, character in enumerate(rendered):
        if character in known:
            pieces.append(rendered[start:at])
            length, start = length + at - start, at + 1
            places.setdefault(character, []).append(length)
    return "".join([*pieces, rendered[start:]]), places


def role_of(message: Any) -> Any:
    """Return the role of a message, or None."""
    return message.get("role") if isinstance(message, dict) else None


def _place_of_mark(text: str) -> int | None:
    """Return where a text gets its mark: before its last character, or before a tag at its end. None: nowhere.

    Templates remove spaces at both ends of a text, and compare its start and its end with tags.
    """
    end = len(text.rstrip())
    if not end:
        return None
    place = text.rfind("<", 0, end) if text[end - 1] == ">" else -1
    if place < 0:
        return end - 1
    return place if text[:place].strip() else None
