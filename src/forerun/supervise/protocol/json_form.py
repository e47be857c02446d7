"""The JSON form of messages.

A message is one JSON object. Its field `kind` names the class. The other fields are those of the class. All processes
of a run have the same version (the leader compares the versions before it admits a host). Decoding therefore accepts
exactly what `encode` writes: it rejects a message with a missing, unknown or wrong field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from forerun.supervise.protocol.messages import (
    FromHost,
    FromLeader,
    FromSupervisor,
    FromWorker,
    Hello,
    Message,
    OpenTunnel,
)


class InvalidMessage(Exception):
    """A message that cannot be decoded. Its sender is not a forerun process of this version."""


def encode(message: Message) -> dict[str, Any]:
    """Return the JSON object of a message. Fields that are None are omitted."""
    values = asdict(message)
    return {"kind": type(message).__name__, **{name: value for name, value in values.items() if value is not None}}


def decode_first(message: Mapping[str, Any]) -> Hello | OpenTunnel:
    """Return the first message of a connection to the leader, or raise InvalidMessage."""
    return _decode(message, (Hello, OpenTunnel))


def decode_from_host(message: Mapping[str, Any]) -> FromHost:
    """Return a message from a host, or raise InvalidMessage."""
    return _decode(message, get_args(FromHost))


def decode_from_leader(message: Mapping[str, Any]) -> FromLeader:
    """Return a message from the leader, or raise InvalidMessage."""
    return _decode(message, get_args(FromLeader))


def decode_from_supervisor(message: Mapping[str, Any]) -> FromSupervisor:
    """Return a message from a supervisor to its worker, or raise InvalidMessage."""
    return _decode(message, get_args(FromSupervisor))


def decode_from_worker(message: Mapping[str, Any]) -> FromWorker:
    """Return a message from a worker, or raise InvalidMessage."""
    return _decode(message, get_args(FromWorker))


def _decode(message: Mapping[str, Any], classes: tuple[Any, ...]) -> Any:
    kind = message.get("kind")
    for known in classes:
        if known.__name__ == kind:
            return _construct(known, {name: value for name, value in message.items() if name != "kind"})
    raise InvalidMessage("a message of an unknown kind")


def _construct(cls: Any, values: Mapping[str, Any]) -> Any:
    hints = _hints(cls)
    if unknown := values.keys() - hints.keys():
        raise InvalidMessage(f"a message '{cls.__name__}' with an unknown field '{min(unknown)}'")
    given = {}
    for name, (hint, required) in hints.items():
        if name not in values and required:
            raise InvalidMessage(f"a message '{cls.__name__}' without '{name}'")
        if name in values:
            try:
                given[name] = _value(values[name], hint)
            except (TypeError, OverflowError) as error:
                raise InvalidMessage(f"a message '{cls.__name__}' with no valid '{name}'") from error
    try:
        return cls(**given)
    except ValueError as error:
        raise InvalidMessage(f"a message '{cls.__name__}' with no valid '{error}'") from error


@cache
def _hints(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field and whether it is required. Fields that can be None are optional."""
    types = get_type_hints(cls)
    return {each.name: (types[each.name], NoneType not in get_args(types[each.name])) for each in fields(cls)}


def _value(value: Any, hint: Any) -> Any:
    """Return `value` if it has the type `hint`, else raise TypeError.

    JSON objects become dataclasses and lists become tuples. Of the other types, only an int is converted: to a float.
    """
    if is_dataclass(hint) and isinstance(value, dict):
        return _construct(hint, value)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _value(value, next(part for part in parts if part is not NoneType))
    if origin is tuple and isinstance(value, list):
        return tuple(_value(each, parts[0]) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _value(each, parts[1]) for name, each in value.items()}
    if hint is float and type(value) in (int, float) and not math.isnan(value):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    raise TypeError
