"""Atomic writes, and bounded reads of regular files."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from forerun.errors import DISK_ERRORS, UserError
from forerun.interrupt import cleanup
from forerun.units import Bytes

PART = ".part"


def atomic_write(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Replace the file at `path` with `content`, durably.

    After a crash or a power loss the file has either its old content or the new one. The umask applies to `mode`.

    Raises:
        OSError: The file could not be written. `error.filename` names `path`, and no temporary file is left.
    """
    with atomic_writer(path, mode) as out:
        out.write(content.encode() if isinstance(content, str) else content)


def write_output(path: Path, content: bytes | str, fix: str, mode: int = 0o666) -> None:
    """Write a file that the user named, like `atomic_write`. Follow links, and write to a device directly.

    Raises:
        UserError: The file cannot be written there, for example because the folder is missing.
        OSError: The disk is full or fails (`DISK_ERRORS`). `error.filename` is set.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            atomic_write(target, content, mode)
    except OSError as error:
        # The user chose this path, so a missing permission is the user's mistake and not a fault of the disk.
        if error.errno in DISK_ERRORS and error.errno != errno.EACCES:
            error.filename = str(path)
            raise
        raise UserError(
            "E-SYSTEM-001",
            f"{path} cannot be written",
            why=str(error.strerror),
            fix=f"{fix}; or check that {path.parent} is a folder in which you may write",
        ) from error


def require_writable_folder(path: Path, key: str) -> None:
    """Raise an error unless the folder that `key` names can be written, or can be created. It is not created here.

    Raises:
        UserError: The path cannot be a folder, or the user may not write there.
        OSError: The disk is full or fails (`DISK_ERRORS`). `error.filename` is set.
    """
    nearest = path
    try:
        nearest = _nearest(path)
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is {file_kind(nearest.stat().st_mode)}, not a folder")
        probe = nearest / f".{secrets.token_hex(4)}{PART}"
        probe.mkdir(0o700)
        probe.rmdir()
    except (OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, OSError) and number in DISK_ERRORS and number != errno.EACCES:
            error.filename = str(path)
            raise
        why = str(getattr(error, "strerror", None) or error)
        raise UserError(
            "E-SYSTEM-002",
            f"{key}: files cannot be written to {path}",
            why=f"{nearest} does not allow new folders" if number == errno.ENOENT else why,
            fix=f"name a folder that you may write to: {key}=FOLDER",
        ) from error


def _nearest(path: Path) -> Path:
    """Return `path`, or the innermost folder above it that exists."""
    path = path.absolute()
    for part in (path, *path.parents):
        try:
            if part.is_symlink() and not part.exists():
                raise NotADirectoryError(
                    errno.ENOTDIR, f"{part} is a link to {os.readlink(part)}, which does not exist"
                )
            part.stat()
        except FileNotFoundError:
            continue
        except NotADirectoryError as error:
            if error.filename is not None:  # a parent of the path is a file
                continue
            raise
        return part
    raise FileNotFoundError(errno.ENOENT, "no folder above it exists")


@contextmanager
def atomic_writer(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`, and move it to `path` when the block ends without an error.

    Raises:
        OSError: As in `atomic_write`.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        with cleanup(lambda: part.unlink(missing_ok=True)):
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            part.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        # The error of a failed write has no file name, and the name of the temporary file means nothing to the user.
        if isinstance(error, OSError) and error.filename in (None, str(part)):
            error.filename, error.filename2 = str(path), None
        raise


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk, where the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading.

    A pipe, a device or a socket is rejected without waiting for it.

    Raises:
        UserError: The file is not a regular file.
        OSError: The file cannot be opened.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UserError(
            "E-SYSTEM-003",
            f"{path} is {file_kind(mode)}, not a file",
            why="only regular files are read",
            fix="give a file",
        )
    return open(descriptor, "rb")


def read_regular(path: Path | str, limit_bytes: int) -> bytes:
    """Return the content of a regular file of at most `limit_bytes`.

    Raises:
        UserError: The file is not a regular file, or it is too large.
        OSError: The file cannot be opened or read.
    """
    with open_regular(path) as file:
        content = file.read(limit_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > limit_bytes:
        raise UserError(
            "E-SYSTEM-004",
            f"{path} is too large",
            why=f"it has {Bytes(size)}, and the limit is {Bytes(limit_bytes)}",
            fix="check that this is the file you mean",
        )
    return content


def file_kind(mode: int) -> str:
    """Return what a file is, with its article: 'a folder', 'a pipe'."""
    kinds = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")
