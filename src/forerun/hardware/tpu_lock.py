"""The holders of libtpu's lock file, from the kernel's lock table. A file left by a dead process has no holders."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = Path("/tmp/libtpu_lockfile")


@dataclass(frozen=True)
class LockHolder:
    """A process that holds the lock."""

    pid: int
    command: str


@dataclass(frozen=True)
class Lock:
    """A lock file that exists. If it has no holders, a dead process left it."""

    path: str
    holders: tuple[LockHolder, ...]
    mine: bool  # whether the file belongs to this user


def read_lock(path: Path = LOCK_FILE, proc: Path = Path("/proc")) -> Lock | None:
    """Return the lock, or None if the file does not exist. Nothing is locked, changed or removed."""
    try:
        status = path.stat()
    except OSError:
        return None
    pids = _lock_holders(status, proc) | _processes_with_open_file(path, proc)
    holders = tuple(LockHolder(pid, _command(pid, proc)) for pid in sorted(pids) if (proc / str(pid)).exists())
    return Lock(str(path), holders, status.st_uid == os.getuid())


def _lock_holders(status: os.stat_result, proc: Path) -> set[int]:
    """Return the processes with a lock on the file.

    The lock table has lines like `1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF`.
    """
    try:
        lines = (proc / "locks").read_text("utf-8").splitlines()
    except OSError:
        return set()
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    fields = [line.replace("-> ", "").split() for line in lines]
    return {int(parts[4]) for parts in fields if len(parts) > 5 and parts[5] == wanted and int(parts[4]) > 0}


def _processes_with_open_file(path: Path, proc: Path) -> set[int]:
    """Return the processes that have the file open, as far as permissions allow.

    This is needed on overlay file systems, where the lock table has another inode.
    """
    return {int(pid) for pid in _listed(proc) if pid.isdigit() and _opens(proc / pid / "fd", path)}


def _opens(descriptors: Path, path: Path) -> bool:
    for number in _listed(descriptors):
        with suppress(OSError):
            if os.readlink(descriptors / number) == str(path):
                return True
    return False


def _listed(folder: Path) -> list[str]:
    """Return the names in a folder; none if it is not readable or its process has ended."""
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
