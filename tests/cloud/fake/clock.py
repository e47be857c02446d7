"""A clock that tests can stop, advance and accelerate."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

START = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()


class FakeClock:
    """Seconds since 1970. It stands still until `run` sets a speed."""

    def __init__(self, start: float = START) -> None:
        self._base, self._since, self.speed = start, time.monotonic(), 0.0

    def now(self) -> float:
        return self._base + (time.monotonic() - self._since) * self.speed

    def run(self, speed: float) -> None:
        self._base, self._since, self.speed = self.now(), time.monotonic(), speed

    def move_to(self, at: float) -> None:
        self._base, self._since = max(at, self.now()), time.monotonic()


def timestamp(at: float) -> str:
    """Return a time as the APIs write it: `2026-11-18T12:00:00.250000Z`."""
    return datetime.fromtimestamp(round(at, 6), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_at(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def http_date(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")


def compute_timestamp(at: float) -> str:
    """Return a time as Compute Engine writes it: `2026-11-18T04:00:00.250-08:00`."""
    return datetime.fromtimestamp(round(at, 3), timezone(timedelta(hours=-8))).isoformat(timespec="milliseconds")
