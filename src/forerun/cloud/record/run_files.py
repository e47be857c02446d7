"""The files of a run's record, in its bucket folder (or a local folder, for machines that share one)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from forerun.cloud.record.entries import (
    AttemptEntry,
    CloudRun,
    EndEntry,
    FinishEntry,
    HostEntry,
    LeaseEntry,
    ReadyEntry,
    StopEntry,
    from_json,
    to_json,
)
from forerun.data.storage.folder import StoreFolder
from forerun.data.storage.location import folder_at

T = TypeVar("T")
CLOUD_FOLDER = "cloud"  # in the run's bucket folder, beside its checkpoints
EXPORT_FOLDER = "export"
_ATTEMPT = re.compile(r"attempts/(\d+)\.json")


class RunFiles:
    """Reads and writes the record of one run.

    Files that are created once decide between concurrent controllers: the first one that creates the file acts,
    and the others read what it has written.

    Args:
      folder: the bucket folder of the run, such as `gs://bucket/runs/quickstart`.
    """

    def __init__(self, folder: str | StoreFolder) -> None:
        self.run_folder = folder_at(folder)
        self.files = self.run_folder.inside(CLOUD_FOLDER)

    @property
    def address(self) -> str:
        return self.run_folder.address

    def run(self) -> CloudRun | None:
        return self._read("run.json", CloudRun)

    def create_run(self, entry: CloudRun) -> bool:
        """Create the record. Return False, and change nothing, if the run has one with other content."""
        return self._create("run.json", entry)

    def replace_run(self, entry: CloudRun) -> None:
        self.files.replace("run.json", to_json(entry))

    def attempts(self) -> dict[int, AttemptEntry]:
        """Return all attempts by their number, from 1 on."""
        names = sorted(name for name in self.files.files() if _ATTEMPT.fullmatch(name))
        contents = self.files.read_many(names)
        found = [from_json(AttemptEntry, content) for content in contents if content is not None]
        return {entry.number: entry for entry in sorted(found, key=lambda entry: entry.number)}

    def attempt(self, number: int) -> AttemptEntry | None:
        return self._read(f"attempts/{number:03}.json", AttemptEntry)

    def create_attempt(self, entry: AttemptEntry) -> bool:
        """Claim the number of an attempt. Return False if another controller has claimed it."""
        return self._create(f"attempts/{entry.number:03}.json", entry)

    def ready(self, attempt: int) -> ReadyEntry | None:
        return self._read(f"attempts/{attempt:03}-ready.json", ReadyEntry)

    def create_ready(self, attempt: int, entry: ReadyEntry) -> ReadyEntry:
        """Record when billing began, if it is not recorded yet. Return what is recorded."""
        self._create(f"attempts/{attempt:03}-ready.json", entry)
        return self.ready(attempt) or entry

    def end(self, attempt: int) -> EndEntry | None:
        return self._read(f"attempts/{attempt:03}-end.json", EndEntry)

    def create_end(self, attempt: int, entry: EndEntry) -> EndEntry:
        """Record the end of an attempt, if it is not recorded yet. Return what is recorded."""
        self._create(f"attempts/{attempt:03}-end.json", entry)
        return self.end(attempt) or entry

    def hosts(self, attempt: int, count: int) -> Mapping[int, HostEntry]:
        """Return the last report of each host that has reported."""
        contents = self.files.read_many([f"hosts/{attempt:03}-{host:02}.json" for host in range(count)])
        return {host: from_json(HostEntry, content) for host, content in enumerate(contents) if content is not None}

    def report_host(self, entry: HostEntry) -> None:
        self.files.replace(f"hosts/{entry.attempt:03}-{entry.host:02}.json", to_json(entry))

    def stop(self) -> StopEntry | None:
        return self._read("stop.json", StopEntry)

    def request_stop(self, entry: StopEntry) -> None:
        self._create("stop.json", entry)

    def withdraw_stop(self) -> None:
        self.files.remove("stop.json")

    def finished(self) -> FinishEntry | None:
        return self._read("finished.json", FinishEntry)

    def create_finished(self, entry: FinishEntry) -> None:
        self._create("finished.json", entry)

    def lease(self) -> LeaseEntry | None:
        return self._read("controller.json", LeaseEntry)

    def write_lease(self, entry: LeaseEntry) -> None:
        self.files.replace("controller.json", to_json(entry))

    def log_names(self, attempt: int, host: int) -> list[str]:
        """Return the names of the parts of a host's log, in their order. A part is never changed after its creation."""
        prefix = f"logs/{attempt:03}-{host:02}/"
        return sorted(name for name in self.files.files() if name.startswith(prefix))

    def add_log(self, attempt: int, host: int, part: int, content: bytes) -> None:
        self.files.create(f"logs/{attempt:03}-{host:02}/{part:06}.log", content)

    def _read(self, name: str, kind: type[T]) -> T | None:
        (content,) = self.files.read_many([name])
        return None if content is None else from_json(kind, content)

    def _create(self, name: str, entry: object) -> bool:
        """Create a file. True also if it exists with the same content: the answer to an earlier try may be lost."""
        content = to_json(entry)
        if self.files.create(name, content):
            return True
        (found,) = self.files.read_many([name])
        return found == content
