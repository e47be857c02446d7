"""Faults of the record: a writer of the bucket damages, forges or deletes its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from simulation.bucket import Bucket

PREFIX = "cloud/"
ODD_VALUES: tuple[Any, ...] = (None, "x", "", True, -1, 0, -1e9, 1e12, 1e308, float("nan"), float("inf"), [], {}, [[]])
ODD_FILES = (b"", b"x", b"\xff\xfe\x00\x01", b"null", b"[]", b'"text"', b"1", b"{", b"{}", b"[" * 3000, b"\0" * 2000)


class Attacker:
    """Writes to the record. Each method returns what it has done, for the trace, or an empty text."""

    def __init__(self, bucket: Bucket, random: Random, now: Callable[[], float]) -> None:
        self.bucket, self.random, self.now = bucket, random, now

    def act(self) -> tuple[str, Callable[[], None] | None]:
        """Change the record once. Return what was done, and how to repeat it, if an attacker would."""
        kind = self.random.choice(("damage", "damage", "forge", "forge", "forge", "forge", "delete", "wipe"))
        if kind == "wipe":
            for name in self.bucket.record():
                del self.bucket.contents[name]
            return "the record is deleted", None
        if kind == "forge":
            return self.forge()
        files = [name for name in self.bucket.record() if "/logs/" not in name]
        if not files:
            return "", None
        name = self.random.choice(files)
        if kind == "delete":
            del self.bucket.contents[name]
            return f"{name} is deleted", lambda: self._delete(name)
        content = self.damaged(self.bucket.contents[name])
        self.bucket.contents[name] = content
        return f"{name} is damaged: {content[:60]!r}", lambda: self._put(name, content)

    def damaged(self, content: bytes) -> bytes:
        """Return the content of a file with an error."""
        kind = self.random.randrange(4)
        if kind == 0:
            return self.random.choice(ODD_FILES)
        if kind == 1:
            return content[: len(content) // 2]
        try:
            values = json.loads(content)
            if not isinstance(values, dict) or not values:
                return b"[]"
        except (RecursionError, ValueError):
            return b"x"
        target = values
        if isinstance(values.get("option"), dict) and self.random.random() < 0.5:
            target = values["option"]
        key = self.random.choice(sorted(target))
        if self.random.random() < 0.2:
            del target[key]
        else:
            target[key] = self.random.choice(ODD_VALUES)
        return json.dumps(values).encode()

    def forge(self) -> tuple[str, Callable[[], None] | None]:
        """Write a valid entry with false values."""
        kinds = ("run", "attempt", "end", "next", "ready", "ends", "host", "lease", "stop", "finish")
        kind = self.random.choice(kinds + kinds[:3])
        forged: dict[str, Any] = getattr(self, f"_{kind}")()
        if not forged:
            return "", None

        def write() -> None:
            for name, values in forged.items():
                self._put(PREFIX + name, json.dumps(values).encode())

        def write_lease() -> None:
            lease = {"holder": "evil", "until": self.now() + 59}  # of usual length, renewed for ever
            self._put(PREFIX + "controller.json", json.dumps(lease).encode())

        write()
        text = ", ".join(f"{name} {json.dumps(values)[:90]}" for name, values in forged.items())
        return f"forged: {text}", write_lease if kind == "lease" else write

    def _put(self, name: str, content: bytes) -> None:
        self.bucket.contents[name] = content

    def _delete(self, name: str) -> None:
        self.bucket.contents.pop(name, None)

    def _values(self, name: str) -> dict[str, Any]:
        try:
            values = json.loads(self.bucket.contents[PREFIX + name])
        except (KeyError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    def _attempts(self) -> list[int]:
        names = [name.removeprefix(PREFIX + "attempts/") for name in self.bucket.record()]
        return sorted(int(name[:3]) for name in names if len(name) == 8 and name[:3].isdecimal())

    def _last(self) -> int:
        return max(self._attempts(), default=1)

    def _run(self) -> dict[str, Any]:
        values = self._values("run.json")
        if not isinstance(values.get("options"), list) or not values["options"]:
            return {}
        option = values["options"][0]
        changes: list[dict[str, Any]] = [
            {"max_usd": 1e6},
            {"max_usd": None},
            {"max_usd": 0.0},
            {"options": [{**option, "usd_per_hour": 1e-6}]},
            {"options": [{**option, "zone": "zone-b"}]},
            {"options": [{**option, "provider": "other"}]},
            {"options": [{**option, "hosts": 1}]},
            {"options": []},
            {"folder": "gs://evil/run"},
            {"name": "other"},
            {"keeper_spent_usd": 0.0, "keeper_at": 4e9},
            {"job": "evil"},
            {"wait_seconds": 10**8},
        ]
        return {"run.json": {**values, **self.random.choice(changes)}}

    def _attempt(self) -> dict[str, Any]:
        number = self._last()
        values = self._values(f"attempts/{number:03}.json")
        if not isinstance(values.get("option"), dict):
            return {}
        option = values["option"]
        changes: list[dict[str, Any]] = [
            {"limit_seconds": 10**8},
            {"limit_seconds": None},
            {"limit_seconds": 0},
            {"option": {**option, "usd_per_hour": 1e-6}},
            {"option": {**option, "zone": "zone-b"}},
            {"option": {**option, "provider": "other"}},
            {"resource": "forerun-other-1"},
            {"created_at": self.now() + 1e7},
            {"spent_usd": 0.0},
        ]
        return {f"attempts/{number:03}.json": {**values, **self.random.choice(changes)}}

    def _next(self) -> dict[str, Any]:
        """Forge an attempt that no controller has started."""
        last = self._last()
        values = self._values(f"attempts/{last:03}.json")
        if not isinstance(values.get("option"), dict):
            return {}
        number = self.random.choice((last + 1, last + 2, 998))
        name = f"forerun-sim-{number}"
        return {f"attempts/{number:03}.json": {**values, "number": number, "resource": name, "limit_seconds": 10**8}}

    def _ready(self) -> dict[str, Any]:
        at = self.now() + self.random.choice((-1e4, 0.0, 1000.0, 1e6, 1e9))
        return {f"attempts/{self._last():03}-ready.json": {"at": at}}

    def _end(self) -> dict[str, Any]:
        reason = self.random.choice(("preempted", "finished", "stopped", "budget", "failed", "broken", "refused"))
        at = self.now() - self.random.choice((0.0, 300.0, 1e6))
        values = {"at": at, "reason": reason, "usd": 0.0, "detail": "", "failure": ""}
        return {f"attempts/{self._last():03}-end.json": values}

    def _ends(self) -> dict[str, Any]:
        """Forge the cost of all attempts that have ended."""
        ends = {f"attempts/{number:03}-end.json" for number in self._attempts()}
        entries = {name: self._values(name) for name in sorted(ends)}
        usd = self.random.choice((0.0, -1e6, float("nan"), 1e6))
        return {name: {**values, "usd": usd} for name, values in entries.items() if values}

    def _host(self) -> dict[str, Any]:
        number, host = self._last(), self.random.randrange(2)
        phases = ("training", "training", "finished", "stopped", "failed", "broken", "preempting", "installing", "zzz")
        values = {
            "attempt": number,
            "host": host,
            "at": self.now() + self.random.choice((-1e4, 0.0, 1e6)),
            "phase": self.random.choice(phases),
            "step": self.random.choice((None, 5, 10**9)),
            "detail": "",
            "exit_code": self.random.choice((None, None, 0, 1, 75)),
            "program": "",
            "save_seconds": self.random.choice((None, 0.0, 1e8, -1e8)),
        }
        return {f"hosts/{number:03}-{host:02}.json": values}

    def _lease(self) -> dict[str, Any]:
        until = self.now() + self.random.choice((59.0, 59.0, 170.0, 1e6, 1e12))
        return {"controller.json": {"holder": self.random.choice(("evil", "keeper:evil")), "until": until}}

    def _stop(self) -> dict[str, Any]:
        at = self.random.choice((0.0, self.now(), self.now() + 1e6, 1e12))
        return {"stop.json": {"at": at, "reason": self.random.choice(("budget", "forerun stop", "preempted"))}}

    def _finish(self) -> dict[str, Any]:
        return {"finished.json": {"at": self.now(), "attempt": self.random.choice((1, self._last())), "files": {}}}
