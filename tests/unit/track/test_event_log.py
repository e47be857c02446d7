from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from recording_reporter import RecordingReporter

from forerun.reporter import SILENT, Reporter
from forerun.track.event_log import EventLog, read_events

OpenLog = Callable[..., EventLog]


@pytest.fixture
def open_log() -> Iterator[OpenLog]:
    """Opens logs that are closed after the test."""
    with ExitStack() as closing:

        def opened(path: Path, reporter: Reporter = SILENT) -> EventLog:
            log = EventLog(path, reporter)
            closing.callback(log.close)
            return log

        yield opened


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_sessions_append_and_are_counted(tmp_path: Path, open_log: OpenLog) -> None:
    path = tmp_path / "events.jsonl"
    for number in (1, 2):
        log = open_log(path)
        assert log.session == number
        assert len(log.earlier) == number - 1
        log.write({"event": "start", "session": number})
    assert lines(path) == [{"event": "start", "session": 1}, {"event": "start", "session": 2}]


def test_an_incomplete_line_of_a_killed_process_is_dropped(tmp_path: Path, open_log: OpenLog) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "start", "session": 4}\nnot json\n{"event": "ti')
    log = open_log(path)
    log.write({"event": "start", "session": log.session})
    assert lines(path) == [{"event": "start", "session": 4}, {"event": "start", "session": 5}]


def test_a_former_owner_does_not_write_to_the_file_of_the_new_one(tmp_path: Path, open_log: OpenLog) -> None:
    path = tmp_path / "events.jsonl"
    old = open_log(path)
    old.write({"event": "start", "session": 1})
    new = open_log(path)
    old.write({"event": "time", "session": 1})
    new.write({"event": "start", "session": 2})
    assert [event["session"] for event in read_events(path)] == [1, 2]


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, open_log: OpenLog) -> None:
    told: list[str] = []
    log = open_log(tmp_path / "missing" / "events.jsonl", RecordingReporter(told))
    log.write({"event": "start"})
    assert len(told) == 1
    assert log.seal(1) is None
    assert log.snapshot() is None


class FullDisk:
    """A file on a disk that is full after `room` more bytes, until `room` is raised."""

    def __init__(self, path: Path, room: int) -> None:
        self._file, self.room = path.open("ab", buffering=0), room

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(content[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_does_not_raise_and_later_lines_are_whole(tmp_path: Path, open_log: OpenLog) -> None:
    told: list[str] = []
    path = tmp_path / "events.jsonl"
    log = open_log(path, RecordingReporter(told))
    disk: Any = FullDisk(path, room=5)
    log.close()
    log._file = disk
    log.write({"event": "start", "session": 1})  # only 5 bytes of it
    log.write({"event": "phase", "session": 1})
    disk.room = 1000
    log.write({"event": "end", "session": 1})
    assert len(told) == 1
    assert read_events(path) == [{"event": "end", "session": 1}]
    seal = log.seal(3)
    assert seal is not None
    assert (seal.bytes, seal.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize("old", [b"", b'{"event": "start", "session": 1}\n'])
def test_the_seal_and_the_snapshot_are_the_content_of_the_file(old: bytes, tmp_path: Path, open_log: OpenLog) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(old)
    log = open_log(path)
    log.write({"event": "start", "session": 2})
    seal, snapshot = log.seal(7), log.snapshot()
    assert seal is not None
    assert snapshot is not None
    content = path.read_bytes()
    log.write({"event": "end"})
    assert snapshot.read(0, snapshot.size) == content
    assert (seal.step, seal.bytes, seal.sha256) == (7, len(content), hashlib.sha256(content).hexdigest())
