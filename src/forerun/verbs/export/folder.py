"""The folder of an export: an unfinished folder next to the target, which one process writes at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forerun.errors import UserError
from forerun.interrupt import cleanup

_HELD = (errno.EAGAIN, errno.EACCES)


@contextmanager
def reserved(target: Path) -> Iterator[None]:
    """Reserve the target for this process, and remove its unfinished folder at the end.

    The kernel releases the lock when the process ends, however it ends. The unfinished folder itself is locked, so no
    lock file remains beside the export.

    Raises:
      UserError: the target has content, or another process writes it.
    """
    require_free(target)
    folder = part_folder(target)
    descriptor = _locked(folder, target)

    def remove() -> None:
        if _is_open_folder(
            descriptor, folder
        ):  # it is not after the rename; another process may have created a new one
            shutil.rmtree(folder, ignore_errors=True)

    try:
        with cleanup(remove):
            require_free(target)  # another export may have finished before the lock was taken
            for child in folder.iterdir():  # of an export that was killed
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
            yield
    finally:
        remove()
        os.close(descriptor)


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Yield the unfinished folder of a reserved target. The block renames it to the target."""
    if target.exists():
        target.rmdir()  # empty
    yield part_folder(target)


def part_folder(target: Path) -> Path:
    """Return the path of the unfinished folder."""
    return target.with_name(f".{target.name}.part")


def require_free(target: Path) -> None:
    """Raise UserError if the target has content."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            "E-RUN-022",
            f"{target} exists already",
            why="an export never writes over anything",
            fix="remove it, or give another folder after --to",
        )


def _locked(folder: Path, target: Path) -> int:
    """Create the unfinished folder and return a descriptor that holds its lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its owner has just renamed or removed it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _HELD:
                    os.close(descriptor)
                    raise UserError(
                        "E-RUN-091",
                        f"another export is writing {target}",
                        why=f"its process holds the lock of {folder}",
                        fix="wait until it ends, or give another folder after --to",
                    ) from None
                # Some network file systems have no locks.
            if _is_open_folder(descriptor, folder):
                return descriptor
            os.close(descriptor)


def _is_open_folder(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
