"""JSON objects that end with a checksum of their own text."""

from __future__ import annotations

import json
from typing import Any

from xxhash import xxh3_64_hexdigest

KEY = b'"xxh3":'
CLAIMS = (KEY, b'"blocks":')  # keys that only objects with a checksum have


def encode(value: dict[str, Any], indent: int | None = None) -> bytes:
    """Return the object as JSON, with its checksum as the last value."""
    separators = (",", ":") if indent is None else None
    body = json.dumps(value, indent=indent, separators=separators).encode()[:-1].rstrip()
    return body + _end(body)


def decode(raw: bytes) -> tuple[dict[str, Any], bool]:
    """Return the object and whether it has a checksum. Objects written by earlier versions have none.

    Raises:
        ValueError: The bytes are not a JSON object, or differ from their checksum.
    """
    checked = is_checked(raw)
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    value.pop("xxh3", None)
    return value, checked


def is_checked(raw: bytes) -> bool:
    """Return whether the bytes end with their checksum. Raise ValueError if it differs."""
    body = raw[: -len(_end(b""))]
    checked = raw == body + _end(body)
    # One damaged byte must not make an object with a checksum look like one of an earlier version, without checksum.
    if not checked and any(claim in raw for claim in CLAIMS):
        raise ValueError("it differs from its checksum")
    return checked


def _end(body: bytes) -> bytes:
    return b"," + KEY + b'"' + xxh3_64_hexdigest(body).encode() + b'"}'
