"""Fields of messages: the form that a template needs, and those that it does not write, such as calls of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from forerun.hub.chat.answer_spans import MarkedTurns, TooLongError, Turns
from forerun.hub.chat.message_marks import THOUGHTS, UnclearError, role_of


def with_arguments(messages: list[Any], *, parse: bool) -> list[Any]:
    """Return the messages with the arguments of calls as objects (`parse`), or as JSON texts.

    Most templates need objects, and datasets contain either. A text that is not JSON of an object stays as it is.
    """

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        held = function.get("arguments")
        value = _parsed(held) if parse else json.dumps(held, ensure_ascii=False) if isinstance(held, dict) else held
        return call if value == held else {**call, "function": {**function, "arguments": value}}

    found = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        found.append({**message, "tool_calls": [*map(changed, calls)]} if isinstance(calls, list) else message)
    return found


def _parsed(arguments: Any) -> Any:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def checked_text(turns: Turns, text: str) -> tuple[str, dict[str, Any] | None]:
    """Return the text of a conversation, and the first part that the template does not write, or None.

    If thoughts have a name that the template does not read, they get another one. The messages of `turns` are then
    those with the other name.
    """
    lost, before = lost_field(turns, text), turns.messages
    if lost is None or lost["field"] not in THOUGHTS:
        return text, lost
    for name in THOUGHTS:
        if name != lost["field"]:
            turns.messages = [_renamed(message, lost["field"], name) for message in before]
            other = _writes(turns, turns.messages)
            if other not in (None, text) and lost_field(turns, other or "") is None:
                return other or "", None
    turns.messages = before
    return text, lost


def _renamed(message: Any, old: str, new: str) -> Any:
    if not isinstance(message, dict) or old not in message or new in message:
        return message
    return {new if key == old else key: value for key, value in message.items()}


def lost_field(turns: Turns, text: str) -> dict[str, Any] | None:
    """Return the first part of a conversation that the template does not write, or None.

    The result has the keys message (a number, or None for the tools) and field, which is "inline" for thoughts in the
    content. A part is lost if its marks are not
    in the text and the text is the same without it. Thoughts of earlier turns do not count: templates remove them to
    save space.
    """
    try:
        found = MarkedTurns(turns, text)
        seen = {found.owners[mark][:2] for mark in found.places}
    except UnclearError:  # assume that contents are written: to compare the text without each would take too long
        seen = {(number, "content") for number in range(len(turns.messages))}
    last_user = max((n for n, message in enumerate(turns.messages) if role_of(message) == "user"), default=-1)
    for number, message in enumerate(turns.messages):
        if not isinstance(message, dict):
            continue
        for field in ("content", "inline", "thoughts", "tool_calls"):
            if field in ("thoughts", "inline") and number < last_user:
                continue
            for without in _without(message, field, number, seen):
                changed = [*turns.messages[:number], without, *turns.messages[number + 1 :]]
                if _writes(turns, changed) == text:
                    names = [name for name in THOUGHTS if message.get(name)]
                    return {"message": number, "field": names[0] if field == "thoughts" else field}
    if turns.tools and _writes(turns, turns.messages, tools=False) == text:
        return {"message": None, "field": "tools"}
    return None


def _without(message: dict[str, Any], field: str, number: int, seen: set[tuple[int, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the message without each part of a field whose marks are not in the text."""
    if field == "content":
        held = message.get("content")
        if held and not (isinstance(held, str) and held.isspace()) and (number, "content") not in seen:
            yield {**message, "content": "" if isinstance(held, str) else []}
    elif field == "inline":
        if role_of(message) == "assistant" and _thought(message.get("content")):
            yield {**message, "content": message["content"].rpartition("</think>")[2]}
    elif field == "thoughts":
        names = [name for name in THOUGHTS if message.get(name)]
        if names and not any((number, name) in seen for name in names):
            yield {key: value for key, value in message.items() if key not in names}
    else:
        held = message.get("tool_calls")
        calls = held if isinstance(held, list) else []
        for at in range(len(calls)):
            if (number, at) not in seen:
                others = [*calls[:at], *calls[at + 1 :]]
                kept = {key: value for key, value in message.items() if key != "tool_calls"}
                yield {**kept, "tool_calls": others} if others else kept


def _writes(turns: Turns, messages: list[Any], *, tools: bool = True) -> str | None:
    """Return the text of other messages, or None if the template cannot write it."""
    try:
        return turns.text(messages, tools=tools)
    except TooLongError:
        raise
    except Exception:
        return None


def has_thoughts(messages: list[Any]) -> bool:
    """Return whether an answer after the last question has thoughts, in a field or in its content."""
    last_user = max((n for n, message in enumerate(messages) if role_of(message) == "user"), default=-1)
    answers = [message for message in messages[last_user + 1 :] if role_of(message) == "assistant"]
    return any(any(one.get(name) for name in THOUGHTS) or _thought(one.get("content")) for one in answers)


def _thought(content: Any) -> bool:
    before, closed, _ = content.partition("</think>") if isinstance(content, str) else ("", "", "")
    return bool(closed and before.replace("<think>", "").strip())
