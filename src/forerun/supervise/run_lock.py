"""One training process per run: a lock file beside the run's folder, held for as long as the process lives.

The kernel releases the lock (`flock`) when the process ends, however it ends, so a killed process leaves no lock. The
file names its holder: process, host and start time. It is stored beside the folder (`runs/.NAME.lock`), because
`--fresh` renames the folder, and a job that fails early must not create it.

Some network file systems have no locks. There, the file's modification time is the only sign of a live holder: the
holder renews it every `BEAT_SECONDS`. A holder without a beat for `LOST_SECONDS` counts as dead.

Reading a run (`eval`, `generate`, `export`) needs no lock. Claims in the log of checkpoints (`forerun.checkpoint.log`)
protect the checkpoints in all cases, including processes on other machines.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun import interrupt
from forerun.errors import DISK_ERRORS, UserError
from forerun.files import read_regular
from forerun.reporter import Reporter
from forerun.units import KIB, Seconds

BEAT_SECONDS = 10.0
LOST_SECONDS = 60.0
_MAX_BYTES = 4 * KIB
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class RunHolder:
    """The process that trains a run, as the lock file names it."""

    pid: int
    host: str
    started: float  # Unix time

    @classmethod
    def this_process(cls) -> RunHolder:
        return cls(os.getpid(), socket.gethostname(), time.time())


class RunLock:
    """The lock of one run. `release` removes the file. A killed process leaves the file behind, but unlocked."""

    def __init__(self, file: Path, descriptor: int, made_folder: bool) -> None:
        self._file, self._descriptor, self._made_folder = file, descriptor, made_folder
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()

    def release(self) -> None:
        """Remove the file and unlock it. If another process has taken the run over, its file stays."""
        self._released.set()
        if _is_at(self._descriptor, self._file):
            with suppress(OSError):
                self._file.unlink()
                if self._made_folder:
                    self._file.parent.rmdir()  # fails if the folder contains a run, which is the usual case
        with suppress(OSError):
            os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._descriptor)


def lock_file(run: Path) -> Path:
    """Return the lock file of a run's folder."""
    named = run if run.name not in ("", "..") else run.resolve()  # `.` has no name
    return named.with_name(f".{named.name}.lock")


@contextmanager
def owned(run: Path, *, take_over: bool, reporter: Reporter) -> Iterator[None]:
    """Hold the lock of a run inside the block.

    Args:
        run: The folder of the run, which need not exist.
        take_over: Whether to replace a live holder. Its next save then fails.
        reporter: Receives a warning if the holder is replaced, or if the file system has no locks.

    Raises:
        UserError: Another live process trains the run.
    """
    lock = acquire(run, take_over=take_over, reporter=reporter)
    try:
        with interrupt.cleanup(lock.release):
            yield
    finally:
        lock.release()


def acquire(run: Path, *, take_over: bool, reporter: Reporter) -> RunLock:
    """Take the lock of a run. See `owned`."""
    file = lock_file(run)
    made_folder = not file.parent.exists()
    while True:
        descriptor = _opened(file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            beat = time.time() - os.fstat(descriptor).st_mtime
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return _without_locks(run, file, beat, take_over, reporter)
            if not isinstance(error, BlockingIOError):
                raise
            holder = holder_of(file)
            if not take_over:
                raise _refusal(run, holder, f"last sign of life {Seconds(max(0.0, beat))} ago") from None
            reporter.warn(f"taking {run} over from {_spoken(holder)}: its next save will fail")
            return _replaced(file)
        if _is_at(descriptor, file):
            _write(descriptor)
            return RunLock(file, descriptor, made_folder)
        os.close(descriptor)  # the holder removed or replaced the file after it was opened here: try again


def _opened(file: Path) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        raise UserError(
            "E-HOSTS-022",
            f"runs cannot be written to {file.parent}",
            why=f"{error.strerror}: {error.filename}",
            fix="name a folder that can be written (runs=...)",
        ) from error


def holder_of(file: Path) -> RunHolder | None:
    """Return the holder that a lock file names, or None if it names none."""
    try:
        content = json.loads(read_regular(file, _MAX_BYTES))
        return RunHolder(int(content["pid"]), str(content["host"]), float(content["started"]))
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _without_locks(run: Path, file: Path, beat: float, take_over: bool, reporter: Reporter) -> RunLock:
    """Take the lock on a file system without locks, unless the last beat of the holder is recent."""
    holder = holder_of(file)
    if holder is not None and beat < LOST_SECONDS and not take_over:
        known = (
            f"last sign of life {Seconds(max(0.0, beat))} ago; {file.parent} has no file locks, so this is uncertain"
        )
        raise _refusal(run, holder, known)
    reporter.warn(
        f"{file.parent} has no file locks: a second process that trains {run.name} may be noticed only at its next save"
    )
    return _replaced(file)


def _replaced(file: Path) -> RunLock:
    """Replace the lock file with a new one that this process locks. The old holder keeps its lock on the old file."""
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with suppress(OSError):  # without locks, only the beats show that this process is alive
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _write(descriptor)
    new.replace(file)
    return RunLock(file, descriptor, made_folder=False)


def _write(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(RunHolder.this_process())).encode(), 0)


def _is_at(descriptor: int, file: Path) -> bool:
    """Return whether the open file is still the one at the path `file`."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _refusal(run: Path, holder: RunHolder | None, known: str) -> UserError:
    return UserError(
        "E-HOSTS-023",
        f"{run} is being trained by another process",
        why=f"{_spoken(holder)}; {known}",
        fix="wait for it or stop it; give this run another name (name=...); or take the run over with --take-over: "
        "the other process then fails at its next save, and this one resumes from the newest checkpoint",
    )


def _spoken(holder: RunHolder | None) -> str:
    if holder is None:
        return "a process that its lock file does not name yet"
    age = Seconds(max(0.0, time.time() - holder.started))
    here = "" if holder.host == socket.gethostname() else ", another host"
    return f"process {holder.pid} on {holder.host}{here}, started {age} ago"
