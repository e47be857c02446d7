"""A run's checkpoints in one folder: written by Orbax in the background, proven, committed and kept by us.

Orbax (`orbax.checkpoint.v1`, which it announces as the top level of its 1.0) writes the arrays of a save into a folder
of their own, `<step>-<fence>-<attempt>`. When they are whole, a thread of ours computes the digest of every file and
appends one record to the log (`forerun.checkpoint.log`). A folder without a record does not exist.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from orbax.checkpoint import v1 as orbax

from forerun.checkpoint import hosts
from forerun.checkpoint.log import Broken, Commit
from forerun.checkpoint.manifest import manifest_of
from forerun.checkpoint.quiet import forget
from forerun.checkpoint.reader import STEP_FOLDER, Reader, Restored, first_line
from forerun.checkpoint.retention import Retention
from forerun.errors import UserError

T = TypeVar("T")

_DISK_TROUBLE = ("os_error_code", "Failed writing", "No space left", "Read-only file system", "Permission denied")
_REMOVALS = 5
_BETWEEN_REMOVALS_SECONDS = 0.05


class SaveFailed(UserError):
    """The run may go on without this checkpoint; what was committed before is whole."""


class TakenOver(UserError):
    """Another process owns the run now: this one must stop."""


class Store:
    """Checkpoints by step, of which those stay that `keep` says (a number: the newest so many).

    Opening it takes the run over (to look only, there is `Reader`): a process that owned it before is refused its next
    commit, and what interrupted saves of former owners left behind is removed. `save` returns as soon as the state
    is copied. What goes wrong afterwards is raised by `check`, which costs nothing and is meant to be called at every
    step, and by `save`, `wait` and `close`. On several hosts every process makes the same calls.
    """

    def __init__(self, folder: Path | str, *, keep: int | Retention, owner: str | None = None) -> None:
        self.retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        self.reader = Reader(folder)
        self.reader.require_records()
        self._log, self._place = self.reader.log, self.reader.place
        self._context = _context()
        self._saving: Future[None] | None = None
        self._attempts = 0
        self.save_seconds: float | None = None  # of the last save, from its call to its commit
        self.fence = hosts.told_by_first(self._claimed(owner) if hosts.is_first() else 0)
        self._next = self.fence + 1

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Save a pytree of arrays and a record that JSON can hold; waits only for an earlier save."""
        self._settle()
        record = json.loads(json.dumps(record))
        self._attempts += 1
        folder = f"{step}-{self.fence}-{self._attempts}"
        # The thread is there before Orbax's are busy: to start one then would cost the step milliseconds.
        started: Future[orbax.AsyncResponse[None]] = Future()
        saving: Future[None] = Future()
        work = (saving, started, step, folder, record)
        threading.Thread(target=self._finish, args=work, name="checkpoint", daemon=True).start()
        try:
            self._place.require_folders(folder)
            with self._context:
                started.set_result(orbax.save_async(f"{self._place.address}/{folder}", state))
        except Exception as error:
            started.set_exception(error)
            saving.result()
            raise
        self._saving = saving

    def check(self) -> None:
        """Raise what went wrong in the background since the last call, if anything did."""
        if self._saving is not None and self._saving.done():
            self._settle()

    def steps(self) -> list[int]:
        """The steps of committed checkpoints, ascending; a save under way is not among them."""
        return self.reader.steps()

    def newest(self) -> int | None:
        return self.reader.newest()

    def record(self, step: int) -> dict[str, Any]:
        return self.reader.record(step)

    def restore(self, step: int, like: T) -> T:
        return self.reader.restore(step, like)

    def restore_newest(self, like: T) -> Restored[T] | None:
        return self.reader.restore_newest(like)

    def wait(self) -> None:
        """Return when the save under way is committed."""
        self._settle()

    def close(self) -> None:
        self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _claimed(self, owner: str | None) -> int:
        try:
            fence = self._log.claim(owner or f"{socket.gethostname()}:{os.getpid()}").fence
        except OSError as error:
            raise UserError(
                f"the run in {self._place.address} cannot be taken over: nothing can be written there",
                why=first_line(error),
                fix="make room and mend permissions there, then run the same command again",
            ) from error
        with suppress(OSError):
            self._remove_leftovers(fence, fence)
        return fence

    def _settle(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _finish(
        self,
        saving: Future[None],
        started: Future[orbax.AsyncResponse[None]],
        step: int,
        folder: str,
        record: dict[str, Any],
    ) -> None:
        """In the background: from the arrays' last byte to the record."""
        began = time.monotonic()
        try:
            self._commit(started, step, folder, record)
            self.save_seconds = time.monotonic() - began
        except BaseException as error:
            saving.set_exception(error)
        else:
            saving.set_result(None)

    def _commit(
        self, started: Future[orbax.AsyncResponse[None]], step: int, folder: str, record: dict[str, Any]
    ) -> None:
        try:
            response = started.result()
            try:
                response.result()
            finally:
                forget(response)
            if not hosts.is_first():
                return
            self._place.flush(folder)
            files = manifest_of(self._place, folder)
            committed = self._appended(step, folder, files, record)
        except Exception as error:
            self._discard(folder)
            if isinstance(error, OSError) or any(words in str(error) for words in _DISK_TROUBLE):
                raise self._not_saved(step, error) from error
            raise
        if not committed:
            self._discard(folder)
            raise self._taken_over(step)
        self._clean()

    def _appended(self, step: int, folder: str, files: dict[str, tuple[int, str]], record: dict[str, Any]) -> bool:
        while True:
            commit = Commit(self._next, self.fence, step, folder, files, record)
            if self._log.commit(commit):
                self._next += 1
                return True
            there = next((other for other in self._log.records() if other.number == commit.number), None)
            if not isinstance(there, Commit) or there.fence != self.fence:
                return False
            self._next += 1  # ours, from a write that succeeded though it was told to have failed
            if there.folder == folder:
                return True

    def _clean(self) -> None:
        """Remove what need not stay: records first, so that a kill in between leaves files that do not count."""
        commits = self._log.commits()
        kept = self.retention.kept(commits)
        with suppress(OSError):  # what cannot be removed now, the next save or the next owner removes
            for commit in commits:
                if commit not in kept:
                    self._log.remove(commit)
            self._log.bury_broken()
            self._remove_leftovers(self.fence, self._next - 1)

    def _remove_leftovers(self, fence: int, last: int) -> None:
        """Folders of this owner and of former ones, which can commit nothing more, that no record names."""
        records = self._log.records()
        if any(isinstance(record, Broken) for record in records):
            return  # it may name any of them
        named = {record.folder for record in records if isinstance(record, Commit)}
        self._log.remove_parts(last)
        for name in self._place.names():
            match = STEP_FOLDER.fullmatch(name)
            if match and int(match["fence"]) <= fence and name not in named:
                self._place.remove(name)

    def _discard(self, folder: str) -> None:
        """A failed save must not keep a full disk full. Its writers may still be ending: hence more than one try."""
        if not hosts.is_first() or any(commit.folder == folder for commit in self._log.commits()):
            return
        for _ in range(_REMOVALS):
            try:
                left = [name for name in self._place.names() if name == folder or name.startswith(f"{folder}.")]
                for name in left:
                    self._place.remove(name)
            except OSError:
                left = [folder]
            if not left:
                return
            time.sleep(_BETWEEN_REMOVALS_SECONDS)

    def _not_saved(self, step: int, error: Exception) -> SaveFailed:
        newest = self.newest()
        rest = "no earlier one exists" if newest is None else f"step {newest} is whole: the same command resumes there"
        return SaveFailed(
            f"the checkpoint of step {step} was not saved",
            why=first_line(error),
            fix=f"make room and mend permissions in {self._place.address}; {rest}",
        )

    def _taken_over(self, step: int) -> TakenOver:
        owner = self._log.owner()
        who = f"claim {owner.number} by {owner.owner}" if owner else "its claim cannot be read"
        return TakenOver(
            f"the checkpoint of step {step} was not saved: another process has taken this run over",
            why=f"{who}; this process holds claim {self.fence}\n{self._place.address}",
            fix="nothing, if that one was meant to go on; else stop it and start the same command again",
        )


def _context() -> orbax.Context:
    context = orbax.Context()
    # Cutting replicated arrays into slices, one per replica, would compile programs in the middle of a run.
    context.array.saving.use_replica_parallel = False
    # Trained weights shrink by a twelfth, for most of a save's time; and without it the disk needed is known.
    context.array.saving.use_compression = False
    return context
