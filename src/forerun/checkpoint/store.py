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
from collections import deque
from collections.abc import Callable, Mapping
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
from forerun.checkpoint.log import Broken, Commit
from forerun.checkpoint.manifest import manifest_of
from forerun.checkpoint.parts import PARTS, Attach, remove_unnamed
from forerun.checkpoint.patience import Away, Patience
from forerun.checkpoint.quiet import forget, release
from forerun.checkpoint.reader import STEP_FOLDER, Reader, Restored, first_line
from forerun.checkpoint.retention import Retention
from forerun.checkpoint.saving import host_copy, orbax_context
from forerun.errors import StorageError, UserError
from forerun.units import Seconds

T = TypeVar("T")

_DISK_TROUBLE = ("os_error_code", "Failed writing", "No space left", "Read-only file system", "Permission denied")
_REMOVALS = 5
_BETWEEN_REMOVALS_SECONDS = 0.05
_QUIET_SECONDS = 2.0  # of waiting for a save before it is told, and then between two words about it
_BETWEEN_WORDS_SECONDS = 30.0


class SaveFailed(StorageError):
    """The run may go on without this checkpoint; what was committed before is whole."""


class TakenOver(UserError):
    """Another process owns the run now: this one must stop."""


@dataclass
class _Saving:
    """A save under way. Where there may be several tries, they write the `copy`; else `save` has `started` the one."""

    step: int
    record: dict[str, Any]
    folder: str
    attach: Attach | None = None
    copy: Any = None
    tries: int = 0
    began: float = field(default_factory=time.monotonic)
    started: Future[orbax.AsyncResponse[None] | None] = field(default_factory=Future)
    done: Future[None] = field(default_factory=Future)


class Store:
    """Checkpoints by step, of which those stay that `keep` says (a number: the newest so many).

    Opening it takes the run over (to look only, there is `Reader`): a process that owned it before is refused its next
    commit, and what interrupted saves of former owners left behind is removed. `save` returns as soon as the state
    is copied. What goes wrong afterwards is raised by `check`, which costs nothing and is meant to be called at every
    step, and by `save`, `wait` and `close`. On several hosts every process makes the same calls.

    A bucket that does not answer is not an error for as long as `patience` says: the save is tried again in the
    background, from a copy of the state in the host's memory, while steps go on. Only the next save waits for it.
    `tell` gets a line about each such trouble and wait, always in the thread that calls the store. (Hosts that save
    together cannot try again one by one: there a failed save is raised, and their supervisors start again.)
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int | Retention,
        owner: str | None = None,
        patience: Patience | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.retention = keep if isinstance(keep, Retention) else Retention(last=keep)
        self._tell, self._words, self._thread = tell, deque[str](), threading.get_ident()
        self.reader = Reader(folder, patience or Patience(), self._say)
        self.reader.require_records()
        self._log, self._place = self.reader.log, self.reader.place
        self._context = orbax_context()
        self._saving: _Saving | None = None
        self._attempts = 0
        self.save_seconds: float | None = None  # of the last save, from its call to its commit
        self.fence = hosts.told_by_first(self._claimed(owner) if hosts.is_first() else 0)
        self._next = self.fence + 1
        if hosts.several():
            self._rehearse()

    def save(self, step: int, state: Any, record: Mapping[str, Any], attach: Attach | None = None) -> None:
        """Save a pytree of arrays and a record that JSON can hold; waits only for an earlier save.

        `attach` stores parts of the run's files, in the background before the commit, and returns what to record.
        """
        self._settle()
        saving = _Saving(step, json.loads(json.dumps(record)), self._new_folder(step), attach)
        # The thread is there before Orbax's are busy: to start one then would cost the step milliseconds.
        threading.Thread(target=self._finish, args=(saving,), name="checkpoint", daemon=True).start()
        try:
            if self._place.patience is not None and hosts.part()[1] == 1:
                saving.copy = host_copy(state)
                saving.started.set_result(None)
            else:
                if hosts.is_first():
                    self._place.require_folders(saving.folder)
                saving.started.set_result(self._begun(saving.folder, state))
        except BaseException as error:  # also Ctrl-C: the end of the process would wait for Orbax's threads
            _release_threads()
            if not saving.started.done():
                saving.started.set_exception(error)
            if isinstance(error, Exception):
                saving.done.result()
            raise
        self._saving = saving

    def check(self) -> None:
        """Tell and raise what went wrong in the background since the last call, if anything did."""
        self._tell_words()
        if self._saving is not None and self._saving.done.done():
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

    def wait(self, seconds: float | None = None) -> bool:
        """Return when the save under way is committed; after `seconds`, without it and False."""
        return self._settle(seconds)

    def close(self) -> None:
        self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._saving is not None and self._saving.tries > 1:
            self._settle(0.0)  # who ends a run does not wait for a bucket that is away
        self.close()

    def _claimed(self, owner: str | None) -> int:
        name = owner or f"{socket.gethostname()}:{os.getpid()}"
        try:
            fence = self._place.patiently(lambda: self._log.claim(name)).fence
        except Away:
            raise
        except OSError as error:
            raise StorageError(
                f"the run in {self._place.address} cannot be taken over: nothing can be written there",
                why=first_line(error),
                fix="make room and mend permissions there, then run the same command again",
            ) from error
        with suppress(OSError):
            self._remove_leftovers(fence, fence)
        return fence

    def _rehearse(self) -> None:
        """On several hosts: does each see the same folder? And a small save, for what Orbax compiles at its first."""
        owner = self._log.owner()
        if owner is None or owner.number != self.fence:
            raise UserError(
                f"this host does not see what host 0 writes to {self._place.address}",
                why=f"claim {self.fence} of host 0 is not there: is it a disk of this host alone?",
                fix="put the run's folder on a file system that all hosts share, or in a bucket",
            )
        folder = f"0-{self.fence}-0"
        with self._context:
            orbax.save_async(f"{self._place.address}/{folder}", {"rehearsal": np.zeros(1, np.int32)}).result()
        if hosts.is_first():
            self._place.remove(folder)

    def _new_folder(self, step: int) -> str:
        self._attempts += 1
        return f"{step}-{self.fence}-{self._attempts}"

    def _settle(self, seconds: float | None = None) -> bool:
        saving, self._saving = self._saving, None
        if saving is None:
            return True
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = _QUIET_SECONDS
        while not saving.done.done():
            left = None if deadline is None else deadline - time.monotonic()
            wait_for([saving.done], pause if left is None else max(0.0, min(pause, left)))
            self._tell_words()
            age = Seconds(time.monotonic() - saving.began)
            if saving.done.done():
                break
            if left is not None and left <= pause:
                self._tell(f"the checkpoint of step {saving.step} is not saved after {age}, and is given up")
                return False
            self._tell(f"waiting for the checkpoint of step {saving.step}, begun {age} ago")
            pause = _BETWEEN_WORDS_SECONDS
        self._tell_words()
        saving.done.result()
        return True

    def _say(self, text: str) -> None:
        """A line for the user, from any thread; from the background it waits for the next call."""
        if threading.get_ident() == self._thread:
            self._tell(text)
        else:
            self._words.append(text)

    def _tell_words(self) -> None:
        while self._words:
            self._tell(self._words.popleft())

    def _finish(self, saving: _Saving) -> None:
        """In the background: from the arrays' last byte to the record."""
        try:
            self._commit(saving)
            self.save_seconds = time.monotonic() - saving.began
        except BaseException as error:
            saving.copy = None
            saving.done.set_exception(error)
        else:
            saving.copy = None
            saving.done.set_result(None)

    def _commit(self, saving: _Saving) -> None:
        step = saving.step
        try:
            response = saving.started.result()
            if response is not None:
                committed = self._written(saving, response)
            else:
                committed = self._place.patiently(lambda: self._attempt(saving))
        except Away as error:
            raise self._not_saved(step, error) from error  # what it left, the next owner removes
        except Exception as error:
            self._discard(saving.folder)
            if self._is_taken_over():  # a new owner removes what we were writing: then this is no trouble of the disk
                raise self._taken_over(step) from error
            if isinstance(error, OSError) or any(words in str(error) for words in _DISK_TROUBLE):
                raise self._not_saved(step, error) from error
            raise
        if not committed:
            self._discard(saving.folder)
            raise self._taken_over(step)
        if hosts.is_first():
            self._clean()

    def _begun(self, folder: str, state: Any) -> orbax.AsyncResponse[None]:
        try:
            with self._context:
                return orbax.save_async(f"{self._place.address}/{folder}", state)
        except BaseException:
            _release_threads()
            raise

    def _attempt(self, saving: _Saving) -> bool:
        """From the copy, each time into a folder of its own: writers of the time before may still be ending."""
        saving.tries += 1
        if saving.tries > 1:
            saving.folder = self._new_folder(saving.step)
        self._place.require_folders(saving.folder)
        return self._written(saving, self._begun(saving.folder, saving.copy))

    def _written(self, saving: _Saving, response: orbax.AsyncResponse[None]) -> bool:
        """Arrays, digests, record; False if another owner has taken the record's number."""
        try:
            response.result()
        except BaseException:
            _release_threads()
            raise
        finally:
            forget(response)
        if not hosts.is_first():
            return True
        self._place.flush(saving.folder)
        if (attach := saving.attach) is not None:
            saving.record[PARTS] = self._place.patiently(lambda: attach(self._place, saving.folder))
        files = self._place.patiently(lambda: manifest_of(self._place, saving.folder))
        return self._place.patiently(lambda: self._appended(saving.step, saving.folder, files, saving.record))

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
        with suppress(OSError):  # what cannot be removed now, the next save or the next owner removes
            commits = self._log.commits()
            kept = self.retention.kept(commits)
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
        remove_unnamed(self._place, fence, [record for record in records if isinstance(record, Commit)])

    def _discard(self, folder: str) -> None:
        """A failed save must not keep a full disk full. Its writers may still be ending: hence more than one try."""
        try:
            if not hosts.is_first() or any(commit.folder == folder for commit in self._log.commits()):
                return
        except Away:
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
        if isinstance(error, Away):
            why = f"{error.what}, in {Seconds((self._place.patience or Patience()).total_seconds)}: {error.why}"
            fix = "mend the network or the bucket; the same command resumes from the newest checkpoint there"
            return SaveFailed(f"the checkpoint of step {step} was not saved", why=why, fix=fix)
        newest = self.newest()
        rest = "no earlier one exists" if newest is None else f"step {newest} is whole: the same command resumes there"
        return SaveFailed(
            f"the checkpoint of step {step} was not saved",
            why=first_line(error),
            fix=f"make room and mend permissions in {self._place.address}; {rest}",
        )

    def _is_taken_over(self) -> bool:
        try:
            owner = self._log.owner()
        except OSError:
            return False
        return owner is not None and owner.number > self.fence

    def _taken_over(self, step: int) -> TakenOver:
        owner = self._log.owner()
        who = f"claim {owner.number} by {owner.owner}" if owner else "its claim cannot be read"
        return TakenOver(
            f"the checkpoint of step {step} was not saved: another process has taken this run over",
            why=f"{who}; this process holds claim {self.fence}\n{self._place.address}",
            fix="nothing, if that one was meant to go on; else stop it and start the same command again",
        )


def _release_threads() -> None:
    """After a save that failed on one host: end the threads of Orbax that would wait for its folders for minutes."""
    if not hosts.several():
        release()
