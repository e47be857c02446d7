"""Opening files that others wrote: regular files only, and only where a checkpoint may keep them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import UserError
from forerun.files import file_kind

_SHOWN_CHARACTERS = 80


def shown(text: str) -> str:
    """A name from a file, fit for a terminal: quoted, escaped, cut."""
    return ascii(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


def roots_of(folder: Path) -> tuple[Path, ...]:
    """Where the files of a checkpoint in `folder` may really lie.

    The folder itself; for a snapshot in a hub cache (models--owner--name/snapshots/commit) also the blobs that
    its links lead to, those of the repository and those that repositories share.
    """
    real = folder.resolve()
    if real.parent.name == "snapshots" and real.parents[1].name.startswith("models--"):
        return real, real.parents[1] / "blobs", real.parents[2] / "blobs"
    return (real,)


@contextmanager
def opened(path: Path, roots: tuple[Path, ...] | None = None) -> Iterator[int]:
    """A descriptor of the regular file `path`, which a link may reach only inside `roots` (its folder by default)."""
    descriptor = open_regular(path, roots)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(path: Path, roots: tuple[Path, ...] | None = None) -> int:
    """As `opened`, for a caller that closes it."""
    allowed = roots_of(path.parent) if roots is None else roots
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(root) for root in allowed):
            raise UserError(
                f"{path} is a link that leads outside its folder",
                why=f"it leads to {real}",
                fix=f"put the file itself there: cp --remove-destination {real} {path}, if you trust it",
            )
        # A pipe or a device must not block here, and a link put there since must not be followed.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY)
    except FileNotFoundError:
        missing = f"the link leads to {os.readlink(path)}" if path.is_symlink() else f"looked in {path.parent}"
        raise UserError(f"{path} is missing", why=missing, fix="fetch the checkpoint again, whole") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be opened", why=str(error), fix="check the file and its permissions") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        kind = file_kind(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        raise UserError(
            f"{path} is {kind}, not a file", why="only regular files are read", fix="fetch the checkpoint again"
        )
    return descriptor


def read_exactly(descriptor: int, size: int, offset: int, path: Path) -> bytes:
    """`size` bytes at `offset`; a file that has become shorter is told."""
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(descriptor, size, offset)
        if not part:
            raise UserError(
                f"{path} ends too early", why=f"no byte at offset {offset}", fix="fetch the file again, it is truncated"
            )
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
