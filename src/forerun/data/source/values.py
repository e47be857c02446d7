"""Checking the values of one row against the form of its source, column by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.data.source.columns import OPTIONAL, Columns, Unfit

MAX_ROW_BYTES = 64 << 20
MAX_DEPTH = 200
_MAX_ID = 1 << 31
_MEND = "mend or delete this row"
# Other names of the two roles that every template knows, as ShareGPT and chat logs have them.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}

_ROLE_NAMES = [name for name, role in _ROLES.items() if role == "assistant"]

Check = Callable[[Mapping[str, Any], str], dict[str, Any]]


def checker(columns: Columns) -> Check:
    """A function from a row of the file to its values by role; it raises Unfit.

    Its second argument is the row as it was written, if it may have \\u escapes: they can hold half a character.
    """
    if columns.form == "text":
        return _text_only(columns)
    checks = _CHECKS | ({"prompt": _asked} if columns.form == "chosen/rejected" else {})
    roles = [(role, name, checks[role]) for role, name in columns.needed.items()]
    extra = [(role, columns.name(role), checks[role]) for role in OPTIONAL.get(columns.form, ())]

    def check(row: Mapping[str, Any], written: str) -> dict[str, Any]:
        values, escaped = {}, "\\u" in written
        for role, name, checked in roles:
            if name not in row:
                columns.require(row)
            values[role] = checked(row[name], name, escaped)
        for role, name, checked in extra:
            if name in row:
                values[role] = checked(row[name], name, escaped)
        _whole(values, columns)
        return values

    return check


def _text_only(columns: Columns) -> Check:
    name = columns.name("text")

    def check(row: Mapping[str, Any], written: str) -> dict[str, Any]:
        value = row.get(name)
        if type(value) is not str:
            columns.require(row)
            raise _wrong(value, name, "text")
        if not value or value.isspace():
            raise _empty(name)
        if not value.isascii() and "\\u" in written:
            _encodable(value, name)
        return {"text": value}

    return check


def _whole(values: dict[str, Any], columns: Columns) -> None:
    """What only the columns together can tell."""
    if columns.form == "prompt/completion" and not values["completion"].strip():
        raise _empty(columns.name("completion"))
    mask = values.get("loss_mask")
    if mask is not None and len(mask) != len(values["input_ids"]):
        raise Unfit(
            f"column {columns.name('loss_mask')!r} is of another length than {columns.name('input_ids')!r}",
            why=f"{len(mask)} and {len(values['input_ids'])}",
            fix=_MEND,
        )


def _text(value: Any, name: str, escaped: bool) -> str:
    if type(value) is not str:
        raise _wrong(value, name, "text")
    if escaped and not value.isascii():
        _encodable(value, name)
    return value


def _messages(value: Any, name: str, escaped: bool) -> list[dict[str, Any]]:
    if type(value) is not list:
        raise _wrong(value, name, "a list of messages")
    messages = _each(value, name, escaped)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not any((message["content"] or "").strip() or message.get("tool_calls") for message in answers):
        roles = ", ".join(dict.fromkeys(_short(message["role"]) for message in messages)) or "none"
        why = "every turn of the assistant is empty" if answers else f"{len(messages)} messages, of the roles {roles}"
        known = f"the assistant's role is assistant, {', '.join(_ROLE_NAMES)}"
        fix = _MEND if answers else f"{_MEND}, or rename the roles: {known}"
        raise Unfit(f"column {name!r} holds no text of the assistant", why=why, fix=fix)
    return messages


def _each(value: list[Any], name: str, escaped: bool) -> list[dict[str, Any]]:
    return [
        message if not escaped and _is_simple(message) else _message(message, f"{name}[{at}]", escaped)
        for at, message in enumerate(value)
    ]


def _is_simple(value: Any) -> bool:
    """Return whether a message is a role and a content, both text, and nothing else, as most are."""
    if type(value) is not dict or len(value) != 2:
        return False
    role = value.get("role")
    return type(role) is str and role not in _ROLES and type(value.get("content")) is str


def _message(value: Any, where: str, escaped: bool) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong(value, where, "a message")
    if "role" not in value and "from" in value and "value" in value:
        rest = {key: held for key, held in value.items() if key not in ("from", "value")}
        value = {"role": value["from"], "content": value["value"], **rest}
    if "role" not in value or ("content" not in value and not value.get("tool_calls")):
        lacking = "role" if "role" not in value else "content"
        raise Unfit(f"{where} has no {lacking!r}", why=f"it has: {', '.join(value) or 'nothing'}", fix=_MEND)
    role = _text(value["role"], f"{where}.role", escaped)
    if role in _ROLES:
        role = _ROLES[role]
        value = {**value, "role": role}
    if value.get("content") is None and role == "assistant" and value.get("tool_calls"):
        value = {**value, "content": None}
    else:
        _text(value["content"], f"{where}.content", escaped)
    if len(value) > 2:
        for key, held in value.items():
            if key not in ("role", "content"):
                _rest(held, f"{where}.{key}", escaped)
    return dict(value)


def _rest(value: Any, where: str, escaped: bool) -> None:
    """Whatever else a message carries reaches the template as it is, so its texts are checked too."""
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, str):
            if escaped and not held.isascii():
                _encodable(held, where)
        elif isinstance(held, dict):
            waiting += [*held, *held.values()]
        elif isinstance(held, list):
            waiting += held


def _ids(value: Any, name: str, escaped: bool) -> list[int]:
    if type(value) is not list:
        raise _wrong(value, name, "a list of token ids")
    if not value:
        raise Unfit(f"column {name!r} is empty", why="a list of 0 token ids", fix=_MEND)
    if set(map(type, value)) != {int}:
        at, held = next((at, held) for at, held in enumerate(value) if type(held) is not int)
        raise _wrong(held, f"{name}[{at}]", "a token id")
    if min(value) < 0 or max(value) >= _MAX_ID:
        at, held = next((at, held) for at, held in enumerate(value) if not 0 <= held < _MAX_ID)
        raise Unfit(f"{name}[{at}] is no token id", why=f"{_short(held)} is not in 0 to {_MAX_ID - 1}", fix=_MEND)
    return value


def _mask(value: Any, name: str, escaped: bool) -> list[int]:
    if type(value) is not list:
        raise _wrong(value, name, "a list of 0 and 1")
    for at, held in enumerate(value):
        if held not in (0, 1):  # true and false are 1 and 0
            raise _wrong(held, f"{name}[{at}]", "0 or 1")
    return [int(held) for held in value]


def _either(value: Any, name: str, escaped: bool) -> Any:
    """A side of a preference pair: text, or messages."""
    return _messages(value, name, escaped) if type(value) is list else _text(value, name, escaped)


def _asked(value: Any, name: str, escaped: bool) -> Any:
    """What both sides of a pair answer: text, or messages."""
    return _each(value, name, escaped) if type(value) is list else _text(value, name, escaped)


_CHECKS: dict[str, Callable[[Any, str, bool], Any]] = {
    "messages": _messages,
    "prompt": _text,
    "completion": _text,
    "chosen": _either,
    "rejected": _either,
    "input_ids": _ids,
    "loss_mask": _mask,
}


def too_deep(value: Any) -> bool:
    """Nested deeper than MAX_DEPTH; the same answer on every Python and at every depth of the stack."""
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


def nested_too_deeply() -> Unfit:
    return Unfit("nested too deeply", why=f"lists and objects in one another to a depth over {MAX_DEPTH}", fix=_MEND)


def too_large(size_bytes: int, limit: int = MAX_ROW_BYTES) -> Unfit:
    return Unfit(
        f"too large: {size_bytes:,} bytes",
        why=f"one row may have {limit:,} bytes ({limit >> 20} MiB)",
        fix="split or delete this row",
    )


def _encodable(value: str, name: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Unfit(
            f"column {name!r} holds half a character",
            why=f"character {error.start} is \\u{ord(value[error.start]):04x}, half of a surrogate pair",
            fix=_MEND,
        ) from error


def _empty(name: str) -> Unfit:
    return Unfit(f"column {name!r} holds no text", why="it is empty or only white space", fix=_MEND)


def _wrong(value: Any, name: str, wanted: str) -> Unfit:
    role = "" if "[" in name else ", or name another column in data.columns"
    kind = f"column {name!r}" if "[" not in name else name
    return Unfit(f"{kind} holds {_kind(value)}, not {wanted}", why=f"it is {_short(value)}", fix=_MEND + role)


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
