"""Readers that return the records of a run again and again, and read only what is new.

A folder is read from the last position of each growing file. A bucket has the copies that belong to the newest
checkpoint, so it is asked for a newer checkpoint and read again if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from forerun.config.schema import Job
from forerun.journal import TailReader
from forerun.report.run_files import Row, line_of, metrics_of, read_hosts, read_lines, read_summary
from forerun.report.run_record import EVENTS, HOSTS, RunRecord, read_run, skips_of
from forerun.reporter import SILENT, Reporter
from forerun.run_folder.run_folder import RunFolder, newest_record, require_run
from forerun.run_folder.stage_folder import run_of
from forerun.storage.address import Address

FOLDER_SECONDS, BUCKET_SECONDS = 1.0, 30.0  # between two reads


class RunReader(Protocol):
    """A reader of one run.

    Attributes:
      every_seconds: the time between two reads.
      folder: the folder of the run, or None for a run in a bucket.
    """

    every_seconds: float
    folder: Path | None

    def read(self) -> RunRecord:
        """Return the records as they are now.

        Raises:
          UserError: the location is not a run.
        """
        ...


def open_reader(location: str | Path, reporter: Reporter = SILENT) -> RunReader:
    """Return the reader of a run's folder, or of the address of its checkpoints in a bucket."""
    return BucketReader(str(location), reporter) if Address.of(location).is_remote else FolderReader(location, reporter)


class GrowingFile:
    """The rows of a file to which lines are appended. The file may be truncated or replaced."""

    def __init__(self, path: Path, parse: Callable[[bytes], Row | None]) -> None:
        self._reader, self._rows, self._generation = TailReader(path, parse), list[Row](), 0

    def read(self) -> tuple[Row, ...]:
        """Return all rows of the file, after its new lines are read."""
        for row in self._reader.rows():
            if self._reader.generation != self._generation:
                self._restart()
            self._rows.append(row)
        if self._reader.generation != self._generation:  # the new file has no complete line yet
            self._restart()
        return tuple(self._rows)

    def _restart(self) -> None:
        self._rows, self._generation = [], self._reader.generation


class SmallFile:
    """The content of a file that is replaced as a unit. It is read again only if it has changed."""

    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        self._path, self._read, self._content = path, read, read(Path(os.devnull))
        self._seen: tuple[int, ...] = ()

    def read(self) -> Any:
        """Return the content, or that of an empty file if the file does not exist."""
        seen: tuple[int, ...] = ()
        with suppress(OSError):
            about = self._path.stat()
            seen = (about.st_ino, about.st_size, about.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._content = seen, self._read(self._path if seen else Path(os.devnull))
        return self._content


class FolderReader:
    """A reader of a run's folder, or of the last stage of a job file with stages."""

    every_seconds = FOLDER_SECONDS

    def __init__(self, location: str | Path, reporter: Reporter = SILENT) -> None:
        self._location, self._reporter = str(location), reporter
        run = RunFolder(run_of(location))
        self.folder: Path | None = run.path
        self._run = run
        self._job: Job | None = None
        self._job_file = SmallFile(run.job, lambda path: object())
        self._job_seen: object = None
        self._metrics = GrowingFile(run.metrics, metrics_of)
        self._events = GrowingFile(run.path / EVENTS, line_of)
        self._skips = SmallFile(run.skips, read_lines)
        self._summary = SmallFile(run.summary, read_summary)
        self._hosts = SmallFile(run.path / HOSTS, read_hosts)
        self._exports = SmallFile(run.path / "exports.jsonl", read_lines)

    def read(self) -> RunRecord:
        """Return the records as they are now."""
        return RunRecord(
            location=self._location,
            job=self._read_job(),
            metrics=self._metrics.read(),
            events=tuple(row for row in self._events.read() if row),
            skips=skips_of(self._skips.read()),
            summary=self._summary.read(),
            hosts=self._hosts.read(),
            exports=self._exports.read(),
        )

    def _read_job(self) -> Job:
        """Return the job. It is read again if its file was replaced, as by a run that is resumed with more steps."""
        seen = self._job_file.read()
        if self._job is None or seen is not self._job_seen:
            self._job = require_run(self._run, self._reporter)
            self._job_seen = seen
        return self._job


class BucketReader:
    """A reader of the copies beside the newest checkpoint in a bucket."""

    every_seconds = BUCKET_SECONDS
    folder: Path | None = None

    def __init__(self, address: str, reporter: Reporter = SILENT) -> None:
        self._address, self._reporter = address, reporter
        self._newest: dict[str, Any] | None = None
        self._record: RunRecord | None = None

    def read(self) -> RunRecord:
        """Return the records of the newest checkpoint.

        The summary is stored after the last checkpoint, so a run at its last step is read until it has one.
        """
        newest = newest_record(self._address, self._reporter)
        record = self._record
        if record is None or newest != self._newest or (record.step == record.job.steps and not record.summary):
            record = self._record = read_run(self._address, self._reporter)
            self._newest = newest
        return record
