"""Who holds libtpu's lock file. The kernel's lock table decides, so a file left by a dead process is told apart."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = Path("/tmp/libtpu_lockfile")


@dataclass(frozen=True)
class Holder:
    pid: int
    command: str


@dataclass(frozen=True)
class Lock:
    """A lock file that exists. Without holders it was left by a dead process."""

    path: str
    holders: tuple[Holder, ...]
    mine: bool


def read_lock(path: Path = LOCK_FILE, proc: Path = Path("/proc")) -> Lock | None:
    """The lock, or None if there is no such file. Looks only: nothing is locked, changed or removed."""
    try:
        status = path.stat()
    except OSError:
        return None
    pids = _locking(status, proc) | _having_open(path, proc)
    holders = tuple(Holder(pid, _command(pid, proc)) for pid in sorted(pids) if (proc / str(pid)).exists())
    return Lock(str(path), holders, status.st_uid == os.getuid())


def _locking(status: os.stat_result, proc: Path) -> set[int]:
    """Processes with a lock on the file, from lines like `1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF`."""
    try:
        lines = (proc / "locks").read_text("utf-8").splitlines()
    except OSError:
        return set()
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    fields = [line.replace("-> ", "").split() for line in lines]
    return {int(parts[4]) for parts in fields if len(parts) > 5 and parts[5] == wanted and int(parts[4]) > 0}


def _having_open(path: Path, proc: Path) -> set[int]:
    """Processes with the file open, as far as we may look: overlay file systems hide the inode from the lock table."""
    return {int(pid) for pid in _listed(proc) if pid.isdigit() and _opens(proc / pid / "fd", path)}


def _opens(descriptors: Path, path: Path) -> bool:
    for number in _listed(descriptors):
        with suppress(OSError):
            if os.readlink(descriptors / number) == str(path):
                return True
    return False


def _listed(folder: Path) -> list[str]:
    """Nothing if it is not ours to look into, or its process has ended meanwhile."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _command(pid: int, proc: Path) -> str:
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "another user's process"
    return b" ".join(words).decode(errors="replace").strip()[:60] or "a process without a command line"
