"""JSON objects that end with a checksum of their own text."""

from __future__ import annotations

import json
from typing import Any

from xxhash import xxh3_64_hexdigest

KEY = b'"xxh3":'


def encode(value: dict[str, Any], indent: int | None = None) -> bytes:
    """Return the object as JSON, with its checksum as the last value."""
    separators = (",", ":") if indent is None else None
    body = json.dumps(value, indent=indent, separators=separators).encode()[:-1].rstrip()
    return body + _end(body)


def decode(raw: bytes) -> dict[str, Any]:
    """Return the object. Raise ValueError if the bytes are not a JSON object that ends with its checksum."""
    require_checksum(raw)
    value: dict[str, Any] = json.loads(raw)
    del value["xxh3"]
    return value


def require_checksum(raw: bytes) -> None:
    """Raise ValueError unless the bytes end with their checksum."""
    body = raw[: -len(_end(b""))]
    if raw != body + _end(body):
        raise ValueError("it differs from its checksum")


def _end(body: bytes) -> bytes:
    return b"," + KEY + b'"' + xxh3_64_hexdigest(body).encode() + b'"}'
