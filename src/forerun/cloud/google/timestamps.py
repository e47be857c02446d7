"""Timestamps of Google's APIs: RFC 3339 with up to nine digits after the point."""

from __future__ import annotations

import datetime as dt
import re

_FRACTION = re.compile(r"\.(\d+)")


def seconds_of(timestamp: object) -> float | None:
    """Return a timestamp such as `2026-11-18T10:00:00.123456789Z` in seconds since 1970, or None if it is not one."""
    if not isinstance(timestamp, str):
        return None
    # datetime accepts at most six digits.
    text = _FRACTION.sub(lambda found: f".{found[1][:6]:0<6}", timestamp.strip().replace("Z", "+00:00"))
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else found.replace(tzinfo=dt.UTC).timestamp()
