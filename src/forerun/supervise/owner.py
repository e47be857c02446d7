"""The supervisor's files of a run: a lock that admits one supervisor, the number of attempts, and a log."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.errors import StorageError, UserError
from forerun.files import atomic_write
from forerun.reporter import SILENT, Reporter

FOLDER = "supervise"


class Owner:
    """The owner of a run, until `release` or the end of the process.

    The kernel releases the lock when the process ends, so a killed process leaves no lock.

    Raises:
        UserError: Another process owns the run, or the file system has no locks.
    """

    def __init__(self, run: Path, reporter: Reporter = SILENT) -> None:
        self._folder = run / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / "owner", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _spoken(os.pread(self._lock, 4096, 0))
            os.close(self._lock)
            raise UserError(
                "E-HOSTS-019",
                f"{run} is being trained already",
                why=f"its owner is {holder}",
                fix="wait for it or end it first; for a second run give another name (name=...)",
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise UserError(
                "E-HOSTS-020",
                f"{self._folder} cannot be locked",
                why=f"{error.strerror}: without a lock, two supervisors could train the same run",
                fix="put runs on a file system with locks (runs=...)",
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self.attempt = self._read_attempt(reporter)

    def next_attempt(self) -> int:
        """Return the number of the next attempt, after it is stored. Raise StorageError if it cannot be stored."""
        number = self.attempt + 1
        try:
            atomic_write(self._folder / "attempt", f"{number}\n")
        except OSError as error:
            raise StorageError(
                "E-HOSTS-021",
                f"{self._folder} cannot be written",
                why=f"{error.strerror}: the number of this attempt must be on disk before it begins",
                fix="free space or repair the disk, then start again: the run resumes from its newest checkpoint",
            ) from error
        self.attempt = number
        return number

    def append_log(self, record: dict[str, Any]) -> None:
        """Append a record to `supervise/log.jsonl`. A full disk is ignored, because the run can continue."""
        with suppress(OSError), (self._folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    @property
    def folder(self) -> Path:
        """The folder of the supervisor's own files."""
        return self._folder

    def keep_stacks(self, attempt: int, host: int, text: str) -> None:
        """Write the stacks of one host to a file. A full disk is ignored, because the run can continue."""
        with suppress(OSError):
            (self._folder / f"stacks-{attempt}-host-{host}.txt").write_text(text, "utf-8")

    def release(self) -> None:
        """Release the lock, so that another process can own the run."""
        os.ftruncate(self._lock, 0)
        os.close(self._lock)

    def _read_attempt(self, reporter: Reporter) -> int:
        """Return the number of the last attempt. If its file is damaged, derive the number from the log."""
        try:
            return int((self._folder / "attempt").read_text("utf-8"))
        except FileNotFoundError:
            return 0
        except ValueError:
            # The log may lack the last attempt, because a power loss removes lines that were not synced.
            number = self._logged_attempt() + 1
            reporter.info(
                f"{self._folder / 'attempt'} is damaged; attempts continue after {number}, from log.jsonl beside it"
            )
            return number

    def _logged_attempt(self) -> int:
        """Return the largest attempt in log.jsonl, or 0 if it has none. Broken lines are ignored."""
        numbers = [0]
        with suppress(OSError):
            for line in (self._folder / "log.jsonl").read_bytes().splitlines():
                with suppress(ValueError, RecursionError, KeyError, TypeError):
                    numbers.append(int(json.loads(line)["attempt"]))
        return max(numbers)


def _spoken(content: bytes) -> str:
    try:
        known = json.loads(content)
        return f"process {known['pid']} on {known['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
