"""The checkpoints of a run, in one folder.

Orbax (`orbax.checkpoint.v1`, which becomes the top level of its 1.0) writes the arrays of a save into a new folder,
`<step>-<fence>-<attempt>`. When they are complete, a background thread computes the digest of every file and appends
one record to the log (`forerun.checkpoint.log`). A folder without a record does not count.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from orbax.checkpoint import v1 as orbax

from forerun.checkpoint import hosts
from forerun.checkpoint.log import BrokenRecord, Commit
from forerun.checkpoint.manifest import manifest_of
from forerun.checkpoint.parts import PARTS, Attach, remove_unnamed
from forerun.checkpoint.reader import STEP_FOLDER, Reader, RestoredCheckpoint
from forerun.checkpoint.saving import Writer, release_threads, saving_context
from forerun.errors import StorageError, UserError, first_line
from forerun.reporter import SILENT, Reporter
from forerun.storage.retries import RetrySchedule, StorageUnavailable
from forerun.units import Seconds

T = TypeVar("T")

_DISK_ERRORS = ("os_error_code", "Failed writing", "No space left", "Read-only file system", "Permission denied")
_REMOVALS = 5  # tries to remove a failed save
_BETWEEN_REMOVALS_SECONDS = 0.05
_QUIET_SECONDS = 2.0  # waiting time for a save before it is reported
_BETWEEN_REPORTS_SECONDS = 30.0  # between two such reports


class SaveFailed(StorageError):
    """A checkpoint was not saved. Those that were committed before are complete, and the run may continue."""


class TakenOver(UserError):
    """Another process owns the run now, so this one must stop."""


@dataclass
class _Save:
    """A save under way.

    The training thread sets `started` after `writer.start`. The background thread waits for it, and sets `done` after
    the commit. Both futures also pass on exceptions.
    """

    step: int
    record: dict[str, Any]
    writer: Writer
    attach: Attach | None = None
    began: float = field(default_factory=time.monotonic)
    started: Future[None] = field(default_factory=Future)
    done: Future[None] = field(default_factory=Future)


class _OneThread(Reporter):
    """Reports warnings in the thread that created it, and keeps those of background threads for `flush`."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._lines, self._thread = reporter, deque[str](), threading.get_ident()

    def warn(self, text: str) -> None:
        if threading.get_ident() == self._thread:
            self._reporter.warn(text)
        else:
            self._lines.append(text)

    def flush(self) -> None:
        """Report the warnings that background threads have left."""
        while self._lines:
            self._reporter.warn(self._lines.popleft())


@dataclass(frozen=True)
class Retention:
    """Rules for the checkpoints to keep. A checkpoint is kept if any of the three rules selects it.

    Args:
      last: number of newest checkpoints to keep.
      every: keep checkpoints whose step is a multiple of this; None: this rule selects none.
      best: number of checkpoints with the lowest `figure` to keep. Those without a finite figure are never selected.
      figure: key of the record that ranks checkpoints.
    """

    last: int
    every: int | None = None
    best: int = 0
    figure: str = "loss"

    def kept(self, commits: Sequence[Commit]) -> list[Commit]:
        """Return the commits to keep, by ascending number.

        Earlier commits with a step not below that of the newest are not kept: the run was rewound after them.
        """
        if not commits:
            return []
        newest = commits[-1]
        line = [commit for commit in commits if commit is newest or commit.step < newest.step]
        ranked = sorted((self._figure(commit), -commit.number) for commit in line)
        best = {-number for figure, number in ranked[: self.best] if math.isfinite(figure)}
        return [
            commit
            for age, commit in enumerate(reversed(line))
            if age < self.last or commit.number in best or (self.every and commit.step % self.every == 0)
        ][::-1]

    def _figure(self, commit: Commit) -> float:
        """Return the figure of a commit, or infinity if it has no finite one."""
        value = commit.record.get(self.figure)
        finite = isinstance(value, int | float) and math.isfinite(value)
        return float(value) if finite else math.inf  # type: ignore[arg-type]


class CheckpointStore:
    """Saves and restores checkpoints by step.

    Opening a store takes the run over (`Reader` only reads). Former owners cannot commit any more, and leftovers of
    their interrupted saves are removed. On several hosts, every process must make the same calls.

    `save` returns as soon as the state is copied. Later errors are raised by `check`, which is cheap and meant for
    every step, and by `save`, `wait` and `close`.

    If a bucket does not answer, the save is tried again in the background within `patience`, while steps continue. It
    uses a copy of the state in the host's memory. Only the next save waits for it.

    Args:
      folder: the folder or bucket of the checkpoints.
      keep: which checkpoints are kept; a number keeps that many of the newest.
      owner: the name of this process in the log; by default the host name and the process id.
      patience: how long to try again if a bucket does not answer.
      reporter: receives a line about each failed try and long wait, always in the thread that calls the store.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int | Retention,
        owner: str | None = None,
        patience: RetrySchedule | None = None,
        reporter: Reporter = SILENT,
    ) -> None:
        self.retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        self._reporter = _OneThread(reporter)
        self.reader = Reader(folder, patience or RetrySchedule(), self._reporter)
        self.reader.require_records()
        self._log, self._storage = self.reader.log, self.reader.storage
        self._context = saving_context(self._storage)
        self._saving: _Save | None = None
        self._attempts = 0
        self.save_seconds: float | None = None  # of the last save, from its call to its commit
        self.fence = hosts.broadcast_from_first(self._claim(owner) if hosts.is_first() else 0)
        self._next = self.fence + 1
        if hosts.several():
            self._rehearse()

    def save(self, step: int, state: Any, record: Mapping[str, Any], attach: Attach | None = None) -> None:
        """Start to save a pytree of arrays. Wait only for an earlier save, and for the copy of the arrays.

        Args:
          step: the step of the checkpoint.
          state: the arrays.
          record: values for the commit record, which JSON can represent.
          attach: stores parts of the run's files, in the background before the commit, and returns what to record.

        Raises:
          SaveFailed: an earlier save failed, or this one cannot be started.
          TakenOver: another process owns the run now.
        """
        self._settle()
        writer = Writer(self._storage, self._context, lambda: self._new_folder(step))
        save = _Save(step, json.loads(json.dumps(record)), writer, attach)
        # Start the thread before those of Orbax are busy. Starting it later would delay the step by milliseconds.
        threading.Thread(target=self._finish, args=(save,), name="checkpoint", daemon=True).start()
        try:
            writer.start(state)
            save.started.set_result(None)
        except BaseException as error:  # also Ctrl-C: otherwise the process would wait for Orbax's threads at its end
            release_threads()
            if not save.started.done():
                save.started.set_exception(error)
            if isinstance(error, Exception):
                save.done.result()  # raises the error as the background thread explains it
            raise
        self._saving = save

    def check(self) -> None:
        """Report messages from the background. Raise the error of a save that has failed since the last call."""
        self._reporter.flush()
        if self._saving is not None and self._saving.done.done():
            self._settle()

    def steps(self) -> list[int]:
        """Return the steps of committed checkpoints, ascending. A save under way is not included."""
        return self.reader.steps()

    def newest(self) -> int | None:
        return self.reader.newest()

    def record(self, step: int) -> dict[str, Any]:
        return self.reader.record(step)

    def restore(self, step: int, like: T) -> T:
        return self.reader.restore(step, like)

    def restore_newest(self, like: T) -> RestoredCheckpoint[T] | None:
        return self.reader.restore_newest(like)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the save under way. Return whether it was committed within `seconds`."""
        return self._settle(seconds)

    def close(self) -> None:
        self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._saving is not None and self._saving.writer.tries > 1:
            self._settle(0.0)  # a failed run does not wait for a bucket that does not answer
        self.close()

    def _claim(self, owner: str | None) -> int:
        """Claim the run, remove leftovers of former owners, and return the fencing number."""
        name = owner or f"{socket.gethostname()}:{os.getpid()}"
        try:
            fence = self._storage.with_retries(lambda: self._log.claim(name)).fence
        except StorageUnavailable:
            raise
        except OSError as error:
            raise StorageError(
                "E-CHECKPOINT-010",
                f"the run in {self._storage.address} cannot be taken over: nothing can be written there",
                why=first_line(error),
                fix="free space or correct the permissions there, then run the same command again",
            ) from error
        with suppress(OSError, UserError):  # some roles may create objects and not delete them
            self._remove_leftovers(fence, fence)
        return fence

    def _rehearse(self) -> None:
        """Check that this host sees the folder of host 0, and do a small save: Orbax compiles in its first one."""
        owner = self._log.owner()
        if owner is None or owner.number != self.fence:
            raise UserError(
                "E-CHECKPOINT-011",
                f"this host does not see what host 0 writes to {self._storage.address}",
                why=f"claim {self.fence} of host 0 is not there; the folder may be on a disk of this host only",
                fix="put the run's folder on a file system that all hosts share, or in a bucket",
            )
        folder = f"0-{self.fence}-0"
        with self._context:
            orbax.save_async(f"{self._storage.address}/{folder}", {"rehearsal": np.zeros(1, np.int32)}).result()
        if hosts.is_first():
            self._storage.remove(folder)

    def _new_folder(self, step: int) -> str:
        self._attempts += 1
        return f"{step}-{self.fence}-{self._attempts}"

    def _settle(self, seconds: float | None = None) -> bool:
        """Wait for the save under way, and raise its error. Return False if it did not end within `seconds`."""
        save, self._saving = self._saving, None
        if save is None:
            return True
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = _QUIET_SECONDS
        while not save.done.done():
            left = None if deadline is None else deadline - time.monotonic()
            wait_for([save.done], pause if left is None else max(0.0, min(pause, left)))
            self._reporter.flush()
            age = Seconds(time.monotonic() - save.began)
            if save.done.done():
                break
            if left is not None and left <= pause:
                self._reporter.warn(f"the checkpoint of step {save.step} was not saved within {age}, and is given up")
                return False
            self._reporter.warn(f"waiting for the checkpoint of step {save.step}, which started {age} ago")
            pause = _BETWEEN_REPORTS_SECONDS
        self._reporter.flush()
        save.done.result()
        return True

    def _finish(self, save: _Save) -> None:
        """Finish a save in the background thread, and pass on its result or its error."""
        try:
            self._write_and_commit(save)
            self.save_seconds = time.monotonic() - save.began
        except BaseException as error:
            save.done.set_exception(error)
        else:
            save.done.set_result(None)

    def _write_and_commit(self, save: _Save) -> None:
        """Write the arrays, compute the digests, append the record, and clean up.

        All hosts write. The first host does the rest for all of them.
        """
        try:
            save.started.result()
            folder = save.writer.write()
            if not hosts.is_first():
                return
            files = self._digest(save, folder)
            committed = self._storage.with_retries(lambda: self._append_record(save.step, folder, files, save.record))
        except StorageUnavailable as error:
            raise self._not_saved(save.step, error) from error  # the next owner removes the files of this save
        except Exception as error:
            self._discard(save.writer.folder)
            if self._is_taken_over():  # the new owner may have removed the files: the disk is not at fault
                raise self._taken_over(save.step) from error
            if isinstance(error, OSError | UserError) or any(words in str(error) for words in _DISK_ERRORS):
                raise self._not_saved(save.step, error) from error
            raise
        if not committed:
            self._discard(folder)
            raise self._taken_over(save.step)
        self._clean()

    def _digest(self, save: _Save, folder: str) -> dict[str, tuple[int, str]]:
        """Flush the arrays, store the parts of the run's files, and return size and digest of each array file."""
        self._storage.flush(folder)
        if (attach := save.attach) is not None:
            save.record[PARTS] = self._storage.with_retries(lambda: attach(self._storage, folder))
        return self._storage.with_retries(lambda: manifest_of(self._storage, folder))

    def _append_record(self, step: int, folder: str, files: dict[str, tuple[int, str]], record: dict[str, Any]) -> bool:
        """Append the commit record. Return False if another owner has taken its number."""
        while True:
            commit = Commit(self._next, self.fence, step, folder, files, record)
            if self._log.commit(commit):
                self._next += 1
                return True
            existing = next((other for other in self._log.records() if other.number == commit.number), None)
            if not isinstance(existing, Commit) or existing.fence != self.fence:
                return False
            self._next += 1  # a write of this process succeeded although it was reported as failed
            if existing.folder == folder:
                return True

    def _clean(self) -> None:
        """Remove checkpoints that are not kept, records first: a kill in between leaves files that do not count."""
        with suppress(OSError, UserError):  # the next save or the next owner removes the rest
            commits = self._log.commits()
            kept = self.retention.kept(commits)
            for commit in commits:
                if commit not in kept:
                    self._log.remove(commit)
            self._log.replace_broken()
            self._remove_leftovers(self.fence, self._next - 1)

    def _remove_leftovers(self, fence: int, last: int) -> None:
        """Remove folders that no record names, of this owner and of former ones, which cannot commit any more."""
        records = self._log.records()
        if any(isinstance(record, BrokenRecord) for record in records):
            return  # a broken record may name any of them
        named = {record.folder for record in records if isinstance(record, Commit)}
        self._log.remove_parts(last)
        for name in self._storage.names():
            match = STEP_FOLDER.fullmatch(name)
            if match and int(match["fence"]) <= fence and name not in named:
                self._storage.remove(name)
        remove_unnamed(self._storage, fence, [record for record in records if isinstance(record, Commit)])

    def _discard(self, folder: str) -> None:
        """Remove a failed save, so that a full disk does not stay full.

        Threads of Orbax may still create files, so this tries more than once.
        """
        try:
            if not hosts.is_first() or any(commit.folder == folder for commit in self._log.commits()):
                return
        except (OSError, UserError):
            return
        for _ in range(_REMOVALS):
            try:
                left = [name for name in self._storage.names() if name == folder or name.startswith(f"{folder}.")]
                for name in left:
                    self._storage.remove(name)
            except (OSError, UserError):
                left = [folder]
            if not left:
                return
            time.sleep(_BETWEEN_REMOVALS_SECONDS)

    def _not_saved(self, step: int, error: Exception) -> SaveFailed:
        if isinstance(error, StorageUnavailable):
            why = f"{error.what}, in {Seconds((self._storage.schedule or RetrySchedule()).total_seconds)}: {error.why}"
            fix = "check the network and the bucket; the same command resumes from the newest checkpoint there"
            return SaveFailed("E-CHECKPOINT-016", f"the checkpoint of step {step} was not saved", why=why, fix=fix)
        newest = self.newest()
        rest = "no earlier one exists" if newest is None else f"the same command resumes from step {newest}"
        return SaveFailed(
            "E-CHECKPOINT-017",
            f"the checkpoint of step {step} was not saved",
            why=first_line(error),
            fix=f"free space or correct the permissions in {self._storage.address}; {rest}",
        )

    def _is_taken_over(self) -> bool:
        try:
            owner = self._log.owner()
        except (OSError, UserError):
            return False
        return owner is not None and owner.number > self.fence

    def _taken_over(self, step: int) -> TakenOver:
        owner = self._log.owner()
        who = f"claim {owner.number} by {owner.owner}" if owner else "its claim cannot be read"
        return TakenOver(
            "E-CHECKPOINT-012",
            f"the checkpoint of step {step} was not saved: another process has taken this run over",
            why=f"{who}; this process holds claim {self.fence}\n{self._storage.address}",
            fix="nothing, if the other process should continue; otherwise stop it and run the same command again",
        )
