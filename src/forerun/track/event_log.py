"""The file events.jsonl of a run: when its processes started, what they did, and where their time went.

Each line is a JSON object with `unix_seconds`, `event` and `session`. Sessions are the processes of a run, from 1. The
file, unlike metrics.jsonl, keeps the lines of steps that are run again: they are part of the history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from forerun.files import atomic_writer
from forerun.journal import Seal, Snapshot
from forerun.reporter import SILENT, Reporter


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run. A missing file has none; broken lines and an incomplete last line are omitted."""
    try:
        *lines, _torn = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return [event for line in lines if (event := _event_of(line)) is not None]


class EventLog:
    """Appends to events.jsonl. Its methods never raise `OSError`: training does not depend on this file.

    Opening writes a new file with the complete lines of the old one, because a former owner of the run may still append
    to the old one.

    Args:
      path: the file.
      reporter: receives one message if the file cannot be written.

    Attributes:
      earlier: the events of earlier sessions.
      session: the number of this session, from 1.
    """

    def __init__(self, path: Path, reporter: Reporter = SILENT) -> None:
        self.path = path
        self._reporter, self._told, self._torn = reporter, False, False
        self._digest, self._bytes = hashlib.sha256(), 0
        self._file: IO[bytes] | None = None
        self.earlier = read_events(path)
        sessions = [event["session"] for event in self.earlier if type(event.get("session")) is int]
        self.session = max(sessions, default=0) + 1
        try:
            if path.exists():
                with atomic_writer(path) as new:
                    for event in self.earlier:
                        line = _line_of(event)
                        new.write(line)
                        self._count(line)
            self._file = path.open("a+b", buffering=0)  # snapshots read it
        except OSError as error:
            self._report(error)

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event in one write. A process that is killed leaves at most one incomplete line."""
        if self._file is None:
            return
        line = (b"\n" if self._torn else b"") + _line_of(event)
        written = 0
        try:
            written = self._file.write(line) or 0
        except OSError as error:
            self._report(error)
        self._count(line[:written])
        self._torn = self._torn if not written else written < len(line)

    def seal(self, step: int) -> Seal | None:
        """Return the length and the digest of the file, for the checkpoint of `step`. None if there is no file.

        The file is not flushed to the disk: its copy beside the checkpoint comes from memory.
        """
        return None if self._file is None else Seal(step, self._bytes, self._digest.hexdigest())

    def snapshot(self) -> Snapshot | None:
        """Return the current content for reading, or None if there is no file."""
        try:
            return None if self._file is None else Snapshot(self._file.fileno(), self._bytes)
        except OSError as error:
            self._report(error)
            return None

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _count(self, content: bytes) -> None:
        self._digest.update(content)
        self._bytes += len(content)

    def _report(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            why = error.strerror or error
            self._reporter.warn(f"{self.path} cannot be written ({why}): the goodput of this run will be incomplete")


def _line_of(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _event_of(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
