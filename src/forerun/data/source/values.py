"""Checks of the values of a row against the form of its source."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from forerun.data.source.columns import Columns
from forerun.data.source.rows import RowError

MAX_ROW_BYTES = 64 << 20
MAX_DEPTH = 200
_MAX_ID = 1 << 31
_FIX_ROW = "fix or delete this row"
# Other names of the roles user and assistant, as in ShareGPT and in chat logs.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}

_ASSISTANT_NAMES = [name for name, role in _ROLES.items() if role == "assistant"]

Check = Callable[[Mapping[str, Any], str], dict[str, Any]]


def checker(columns: Columns) -> Check:
    """Return a function that checks a row of the file and returns its values by role.

    The function raises RowError for a bad row. Its second argument is the row as it is written in the file, or ""
    if the format has no \\u escapes. Such an escape can be half of a surrogate pair, so these rows need another check.
    """
    if columns.form == "text" and not columns.templates:
        return _text_only(columns)
    checks = _CHECKS | _CHECKS_OF_FORM.get(columns.form, {})
    roles = [(role, name, checks[role]) for role, name in columns.needed.items()]
    extra = [(role, name, checks[role]) for role, name in columns.optional.items()]
    built = [(role, one, columns.name(role), checks[role]) for role, one in columns.templates.items()]

    def check(row: Mapping[str, Any], written: str) -> dict[str, Any]:
        values, escaped = {}, "\\u" in written
        for role, name, checked in roles:
            if name not in row:
                columns.require(row)
            values[role] = checked(row[name], name, escaped)
        for role, name, checked in extra:
            if name in row:
                values[role] = checked(row[name], name, escaped)
        for role, template, name, checked in built:
            values[role] = checked(template.fill(row), name, escaped)
        _check_columns_together(values, columns)
        return values

    return check


def _text_only(columns: Columns) -> Check:
    name = columns.name("text")

    def check(row: Mapping[str, Any], written: str) -> dict[str, Any]:
        value = row.get(name)
        if type(value) is not str:
            columns.require(row)
            raise _wrong_type(value, name, "text")
        if not value or value.isspace():
            raise _empty(name)
        if not value.isascii() and "\\u" in written:
            _require_encodable(value, name)
        return {"text": value}

    return check


def _check_columns_together(values: dict[str, Any], columns: Columns) -> None:
    """Raise RowError if an answer is empty, or if the loss mask and the token ids have different lengths."""
    for role in ("text", "completion", "output"):
        if type(values.get(role)) is str and not values[role].strip():
            raise _empty(columns.name(role))
    mask = values.get("loss_mask")
    if mask is not None and len(mask) != len(values["input_ids"]):
        raise RowError(
            "E-DATA-062",
            f"columns {columns.name('loss_mask')!r} and {columns.name('input_ids')!r} have different lengths",
            why=f"{len(mask)} and {len(values['input_ids'])}",
            fix=_FIX_ROW,
        )


def _text(value: Any, name: str, escaped: bool) -> str:
    if type(value) is not str:
        raise _wrong_type(value, name, "text")
    if escaped and not value.isascii():
        _require_encodable(value, name)
    return value


def _messages(value: Any, name: str, escaped: bool) -> list[dict[str, Any]]:
    if type(value) is not list:
        raise _wrong_type(value, name, "a list of messages")
    messages = _message_list(value, name, escaped)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not any((message["content"] or "").strip() or message.get("tool_calls") for message in answers):
        roles = ", ".join(dict.fromkeys(_short(message["role"]) for message in messages)) or "none"
        why = "every turn of the assistant is empty" if answers else f"{len(messages)} messages with the roles {roles}"
        known = f"the assistant's role is assistant, {', '.join(_ASSISTANT_NAMES)}"
        fix = _FIX_ROW if answers else f"{_FIX_ROW}, or rename the roles: {known}"
        raise RowError("E-DATA-063", f"column {name!r} holds no text of the assistant", why=why, fix=fix)
    return messages


def _message_list(value: list[Any], name: str, escaped: bool) -> list[dict[str, Any]]:
    """Return the checked messages. The common simple ones take a fast path."""
    return [
        message if not escaped and _is_simple(message) else _message(message, f"{name}[{at}]", escaped)
        for at, message in enumerate(value)
    ]


def _is_simple(value: Any) -> bool:
    """Return whether a message has only a role that needs no renaming and a content, both text. Most have."""
    if type(value) is not dict or len(value) != 2:
        return False
    role = value.get("role")
    return type(role) is str and role not in _ROLES and type(value.get("content")) is str


def _message(value: Any, where: str, escaped: bool) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong_type(value, where, "a message")
    if "role" not in value and "from" in value and "value" in value:
        rest = {key: held for key, held in value.items() if key not in ("from", "value")}
        value = {"role": value["from"], "content": value["value"], **rest}
    if "role" not in value or ("content" not in value and not value.get("tool_calls")):
        raise _incomplete(value, where, "role" if "role" not in value else "content")
    if type(value.get("content")) is list:
        value = {**value, "content": _joined_parts(value["content"], f"{where}.content", escaped)}
    role = _text(value["role"], f"{where}.role", escaped)
    if role in _ROLES:
        role = _ROLES[role]
        value = {**value, "role": role}
    if value.get("content") is None and role == "assistant" and value.get("tool_calls"):
        value = {**value, "content": None}
    elif "content" not in value:  # only the assistant may call tools without text
        raise _incomplete(value, where, "content")
    else:
        _text(value["content"], f"{where}.content", escaped)
    if len(value) > 2:
        for key, held in value.items():
            if key not in ("role", "content"):
                _check_texts(held, f"{where}.{key}", escaped)
    return dict(value)


def _joined_parts(parts: list[Any], where: str, escaped: bool) -> str:
    """Return the texts of content parts, joined without a separator. Raise RowError for parts that are not text."""
    for at, part in enumerate(parts):
        kind = part.get("type") if type(part) is dict else None
        if kind != "text" or "text" not in part:
            named = "a part without text" if kind == "text" else f"of the type {_short(kind)}" if kind else _kind(part)
            raise RowError(
                "E-DATA-123",
                f"{where}[{at}] is {named}, not a text",
                why="forerun trains only the text part of a model, without images, audio and video: a part must be "
                '{"type": "text", "text": "..."}',
                fix=_FIX_ROW + ", or skip such rows: data.bad_rows=0.01",
            )
    return "".join(_text(part["text"], f"{where}[{at}].text", escaped) for at, part in enumerate(parts))


def _incomplete(message: Mapping[str, Any], where: str, key: str) -> RowError:
    why = f"it has: {', '.join(message) or 'nothing'}"
    return RowError("E-DATA-064", f"{where} has no {key!r}", why=why, fix=_FIX_ROW)


def _check_texts(value: Any, where: str, escaped: bool) -> None:
    """Check all texts in another field of a message, because the template receives the field unchanged."""
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, str):
            if escaped and not held.isascii():
                _require_encodable(held, where)
        elif isinstance(held, dict):
            waiting += [*held, *held.values()]
        elif isinstance(held, list):
            waiting += held


def _ids(value: Any, name: str, escaped: bool) -> list[int]:
    if type(value) is not list:
        raise _wrong_type(value, name, "a list of token ids")
    if not value:
        raise RowError("E-DATA-065", f"column {name!r} is empty", why="a list of 0 token ids", fix=_FIX_ROW)
    if set(map(type, value)) != {int}:
        at, held = next((at, held) for at, held in enumerate(value) if type(held) is not int)
        raise _wrong_type(held, f"{name}[{at}]", "a token id")
    if min(value) < 0 or max(value) >= _MAX_ID:
        at, held = next((at, held) for at, held in enumerate(value) if not 0 <= held < _MAX_ID)
        raise RowError(
            "E-DATA-066",
            f"{name}[{at}] is not a token id",
            why=f"{_short(held)} is not between 0 and {_MAX_ID - 1}",
            fix=_FIX_ROW,
        )
    return value


def _mask(value: Any, name: str, escaped: bool) -> list[int]:
    if type(value) is not list:
        raise _wrong_type(value, name, "a list of 0 and 1", has_key=False)
    for at, held in enumerate(value):
        if held not in (0, 1):  # True and False equal 1 and 0
            raise _wrong_type(held, f"{name}[{at}]", "0 or 1")
    return [int(held) for held in value]


def _answer(value: Any, name: str, escaped: bool) -> Any:
    """Return the checked answer to a prompt, which is a text or a list of messages."""
    return _messages(value, name, escaped) if type(value) is list else _text(value, name, escaped)


def _prompt(value: Any, name: str, escaped: bool) -> Any:
    """Return the checked prompt of an answer or of a pair, which is a text or a list of messages."""
    return _message_list(value, name, escaped) if type(value) is list else _text(value, name, escaped)


def _text_or_null(value: Any, name: str, escaped: bool) -> str:
    """Return the checked text, or "" for null."""
    return "" if value is None else _text(value, name, escaped)


def _tools(value: Any, name: str, escaped: bool) -> list[dict[str, Any]] | None:
    """Return the checked tools, which are a list of objects, or its JSON text. Return None if there are none."""
    found = value
    if type(value) is str:
        try:
            found = json.loads(value) if value.strip() else None
        except ValueError:
            raise _wrong_type(value, name, "a list of tools", has_key=False) from None
    if found is None or found == []:
        return None
    if type(found) is not list:
        raise _wrong_type(value, name, "a list of tools", has_key=False)
    for at, tool in enumerate(found):
        if type(tool) is not dict:
            raise _wrong_type(tool, f"{name}[{at}]", "a tool, which is an object")
        _check_texts(tool, f"{name}[{at}]", escaped or type(value) is str)
    return found


_CHECKS: dict[str, Callable[[Any, str, bool], Any]] = {
    "text": _text,
    "messages": _messages,
    "instruction": _text,
    "input": _text_or_null,
    "output": _text,
    "prompt": _text,
    "completion": _text,
    "chosen": _answer,
    "rejected": _answer,
    "input_ids": _ids,
    "loss_mask": _mask,
    "tools": _tools,
}
_CHECKS_OF_FORM: dict[str, dict[str, Callable[[Any, str, bool], Any]]] = {
    "chosen/rejected": {"prompt": _prompt},
    "prompt/completion messages": {"prompt": _prompt, "completion": _answer},
}


def too_deep(value: Any) -> bool:
    """Return whether `value` is nested deeper than MAX_DEPTH.

    The function does not recurse, so the result does not depend on the Python version or the depth of the stack.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        inner: list[Any] = []
        for held in level:
            children = held.values() if isinstance(held, dict) else held
            inner += [child for child in children if isinstance(child, (dict, list))]
        level = inner
    return False


def nested_too_deeply() -> RowError:
    """Return the error for a row that is nested deeper than MAX_DEPTH."""
    return RowError(
        "E-DATA-067",
        "nested too deeply",
        why=f"lists and objects are nested more than {MAX_DEPTH} levels deep",
        fix=_FIX_ROW,
    )


def too_large(size_bytes: int, limit: int = MAX_ROW_BYTES) -> RowError:
    """Return the error for a row that has more than `limit` bytes."""
    return RowError(
        "E-DATA-068",
        f"too large: {size_bytes:,} bytes",
        why=f"a row may have at most {limit:,} bytes ({limit >> 20} MiB)",
        fix="split or delete this row",
    )


def _require_encodable(value: str, name: str) -> None:
    """Raise RowError if `value` cannot be encoded as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            "E-DATA-069",
            f"column {name!r} holds half a character",
            why=f"character {error.start} is \\u{ord(value[error.start]):04x}, half of a surrogate pair",
            fix=_FIX_ROW,
        ) from error


def _empty(name: str) -> RowError:
    return RowError(
        "E-DATA-070", f"column {name!r} holds no text", why="it is empty or has only white space", fix=_FIX_ROW
    )


def _wrong_type(value: Any, name: str, wanted: str, *, has_key: bool = True) -> RowError:
    """Return the error for a value of the wrong type. With `has_key`, data.columns can name another column."""
    role = "" if "[" in name or not has_key else ", or name another column in data.columns"
    kind = f"column {name!r}" if "[" not in name else name
    return RowError(
        "E-DATA-071", f"{kind} holds {_kind(value)}, not {wanted}", why=f"it is {_short(value)}", fix=_FIX_ROW + role
    )


def _kind(value: object) -> str:
    names = {
        bool: "true/false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object",
        bytes: "bytes",
    }  # fmt: skip
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        value = value[:50]
    shown = repr(value) if not isinstance(value, (list, dict)) else f"{_kind(value)} of {len(value)}"
    return shown if len(shown) <= 40 else shown[:40] + "..."
