"""The files of a run's record, in its bucket folder (or a local folder, for machines that share one)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from forerun.cloud.record.entries import (
    AttemptEntry,
    CloudRun,
    EndEntry,
    FinishEntry,
    HostEntry,
    LeaseEntry,
    ReadyEntry,
    StopEntry,
)
from forerun.cloud.record.read_entry import DamagedEntry, read_entry, undamaged, write_entry
from forerun.storage.folder import Folder
from forerun.storage.open_folder import folder_at

T = TypeVar("T")
CLOUD_FOLDER = "cloud"  # in the run's bucket folder, beside its checkpoints
EXPORT_FOLDER = "export"
STOP, FINISHED, LEASE = "stop.json", "finished.json", "controller.json"
_ATTEMPT = re.compile(r"attempts/([0-9]{3,4})\.json")


class RunFiles:
    """Reads and writes the record of one run.

    Files that are created once decide between concurrent controllers: the first one that creates the file acts,
    and the others read what it has written.

    A file with an invalid entry is returned as `DamagedEntry`: everyone who may write to the bucket can damage it.
    Entries that decide nothing between controllers replace a damaged one.

    Args:
      folder: the bucket folder of the run, such as `gs://bucket/runs/quickstart`.
    """

    def __init__(self, folder: str | Folder) -> None:
        self.run_folder = folder_at(folder)
        self.files = self.run_folder.inside(CLOUD_FOLDER)

    @property
    def address(self) -> str:
        return self.run_folder.address

    def run(self) -> CloudRun | DamagedEntry | None:
        return self._read("run.json", CloudRun)

    def create_run(self, entry: CloudRun) -> bool:
        """Create the record. Return False, and change nothing, if the run has one with other content."""
        return self._create("run.json", entry)

    def replace_run(self, entry: CloudRun) -> None:
        self.files.replace("run.json", write_entry(entry))

    def attempts(self) -> dict[int, AttemptEntry | DamagedEntry]:
        """Return all attempts by the number in the names of their files, in ascending order."""
        names = self.files.files()
        numbers = sorted(int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name)))
        entries = self._read_attempts([number for number in numbers if number and _attempt_name(number) in names])
        return {number: entry for number, entry in entries.items() if entry is not None}

    def attempt(self, number: int) -> AttemptEntry | DamagedEntry | None:
        return self._read_attempts([number])[number]

    def _read_attempts(self, numbers: Sequence[int]) -> dict[int, AttemptEntry | DamagedEntry | None]:
        entries = self._read_many([_attempt_name(number) for number in numbers], AttemptEntry)
        return {
            number: self._damaged(_attempt_name(number), f"it is the entry of attempt {entry.number}")
            if isinstance(entry, AttemptEntry) and entry.number != number
            else entry
            for number, entry in zip(numbers, entries, strict=True)
        }

    def create_attempt(self, entry: AttemptEntry) -> bool:
        """Claim the number of an attempt. Return False if another controller has claimed it."""
        return self._create(_attempt_name(entry.number), entry)

    def ready(self, attempt: int) -> ReadyEntry | DamagedEntry | None:
        return self._read(_ready_name(attempt), ReadyEntry)

    def create_ready(self, attempt: int, entry: ReadyEntry) -> ReadyEntry:
        """Record when billing began, if it is not recorded yet. Return what is recorded."""
        return self._record(_ready_name(attempt), entry)

    def end(self, attempt: int) -> EndEntry | DamagedEntry | None:
        return self._read(_end_name(attempt), EndEntry)

    def create_end(self, attempt: int, entry: EndEntry) -> EndEntry:
        """Record the end of an attempt, if it is not recorded yet. Return what is recorded."""
        return self._record(_end_name(attempt), entry)

    def hosts(self, attempt: int, count: int) -> dict[int, HostEntry | DamagedEntry]:
        """Return the last report of each host that has reported."""
        names = [_host_name(attempt, host) for host in range(count)]
        reports: dict[int, HostEntry | DamagedEntry] = {}
        for host, (name, entry) in enumerate(zip(names, self._read_many(names, HostEntry), strict=True)):
            if isinstance(entry, HostEntry) and (entry.attempt, entry.host) != (attempt, host):
                entry = self._damaged(name, f"it is the report of host {entry.host} of attempt {entry.attempt}")
            if entry is not None:
                reports[host] = entry
        return reports

    def report_host(self, entry: HostEntry) -> None:
        self.files.replace(_host_name(entry.attempt, entry.host), write_entry(entry))

    def stop(self) -> StopEntry | DamagedEntry | None:
        return self._read(STOP, StopEntry)

    def request_stop(self, entry: StopEntry) -> None:
        self._record(STOP, entry)

    def withdraw_stop(self) -> None:
        self.files.remove(STOP)

    def finished(self) -> FinishEntry | DamagedEntry | None:
        return self._read(FINISHED, FinishEntry)

    def create_finished(self, entry: FinishEntry) -> None:
        self._record(FINISHED, entry)

    def lease(self) -> LeaseEntry | DamagedEntry | None:
        return self._read(LEASE, LeaseEntry)

    def write_lease(self, entry: LeaseEntry) -> None:
        self.files.replace(LEASE, write_entry(entry))

    def add_log(self, attempt: int, host: int, part: int, content: bytes) -> None:
        self.files.create(f"logs/{attempt:03}-{host:02}/{part:06}.log", content)

    def progress(
        self, attempts: Iterable[int]
    ) -> tuple[
        dict[int, ReadyEntry | DamagedEntry | None],
        dict[int, EndEntry | DamagedEntry | None],
        StopEntry | DamagedEntry | None,
        FinishEntry | DamagedEntry | None,
        LeaseEntry | DamagedEntry | None,
    ]:
        """Return starts and ends of attempts, and the run's stop, end and lease, by one concurrent read."""
        numbers = tuple(attempts)
        kinds: list[tuple[str, type[Any]]] = [(STOP, StopEntry), (FINISHED, FinishEntry), (LEASE, LeaseEntry)]
        kinds += [(_ready_name(number), ReadyEntry) for number in numbers]
        kinds += [(_end_name(number), EndEntry) for number in numbers]
        stop, finished, lease, *times = self._read_files(kinds)
        ready = dict(zip(numbers, times[: len(numbers)], strict=True))
        ends = dict(zip(numbers, times[len(numbers) :], strict=True))
        return ready, ends, stop, finished, lease

    def _read(self, name: str, kind: type[T]) -> T | DamagedEntry | None:
        return self._read_many([name], kind)[0]

    def _read_many(self, names: Sequence[str], kind: type[T]) -> list[T | DamagedEntry | None]:
        return self._read_files([(name, kind) for name in names])

    def _read_files(self, files: Sequence[tuple[str, type[Any]]]) -> list[Any]:
        """Return the entry, DamagedEntry or None for each (name, kind)."""
        try:
            contents = self.files.read_many([name for name, _ in files])
        except IsADirectoryError:
            if len(files) > 1:
                return [entry for file in files for entry in self._read_files([file])]
            return [self._damaged(files[0][0], "it is a folder")]
        return [
            None if content is None else read_entry(kind, self._path(name), content)
            for (name, kind), content in zip(files, contents, strict=True)
        ]

    def _damaged(self, name: str, reason: str) -> DamagedEntry:
        return DamagedEntry(self._path(name), reason)

    def _path(self, name: str) -> str:
        return f"{self.files.address}/{name}"

    def _record(self, name: str, entry: T) -> T:
        """Create a file, or replace a damaged one. Return its entry."""
        if self._create(name, entry):
            return entry
        recorded = self._read(name, type(entry))
        if isinstance(recorded, DamagedEntry):
            self.files.replace(name, write_entry(entry))
        return undamaged(recorded) or entry

    def _create(self, name: str, entry: object) -> bool:
        """Create a file. True also if it exists with the same content: the answer to an earlier try may be lost."""
        content = write_entry(entry)
        if self.files.create(name, content):
            return True
        (found,) = self.files.read_many([name])
        return found == content


def _attempt_name(number: int) -> str:
    return f"attempts/{number:03}.json"


def _ready_name(attempt: int) -> str:
    return f"attempts/{attempt:03}-ready.json"


def _end_name(attempt: int) -> str:
    return f"attempts/{attempt:03}-end.json"


def _host_name(attempt: int, host: int) -> str:
    return f"hosts/{attempt:03}-{host:02}.json"
