"""Safe opening of untrusted files: regular files only, and only in the folders of their checkpoint."""

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
    """Return text from a file in a form that is safe to print: quoted, escaped and shortened."""
    return ascii(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


def roots_of(folder: Path) -> tuple[Path, ...]:
    """Return the folders that may contain the files of a checkpoint after links are resolved.

    This is the folder itself. For a snapshot in a hub cache (models--owner--name/snapshots/commit) it also includes the
    targets of its links: the blobs of the repository, and the blobs that repositories share.
    """
    real = folder.resolve()
    if real.parent.name == "snapshots" and real.parents[1].name.startswith("models--"):
        return real, real.parents[1] / "blobs", real.parents[2] / "blobs"
    return (real,)


@contextmanager
def opened(path: Path, roots: tuple[Path, ...] | None = None) -> Iterator[int]:
    """Open the regular file `path` and yield its descriptor.

    Its real path must be inside `roots` (default: those of its folder), otherwise a UserError is raised.
    """
    descriptor = open_regular(path, roots)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(path: Path, roots: tuple[Path, ...] | None = None) -> int:
    """Return a descriptor as `opened` does. The caller must close it."""
    allowed = roots_of(path.parent) if roots is None else roots
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(root) for root in allowed):
            raise UserError(
                "E-HUB-011",
                f"{path} is a link that leads outside its folder",
                why=f"it leads to {real}",
                fix=f"if you trust the file, replace the link by a copy: cp --remove-destination {real} {path}",
            )
        # Opening a pipe or a device must not block. A link that appeared since `resolve` must not be followed.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY)
    except FileNotFoundError:
        missing = f"the link leads to {os.readlink(path)}" if path.is_symlink() else f"looked in {path.parent}"
        raise UserError("E-HUB-012", f"{path} is missing", why=missing, fix="download all files again") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            "E-HUB-013", f"{path} cannot be opened", why=str(error), fix="check the file and its permissions"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        kind = file_kind(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        raise UserError(
            "E-HUB-014",
            f"{path} is {kind}, not a file",
            why="forerun reads only regular files",
            fix="download the checkpoint again",
        )
    return descriptor


def read_exactly(descriptor: int, size: int, offset: int, path: Path) -> bytes:
    """Return `size` bytes at `offset`. Raise a UserError if the file ends before that."""
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(descriptor, size, offset)
        if not part:
            raise UserError(
                "E-HUB-015",
                f"{path} ends too early",
                why=f"no byte at offset {offset}",
                fix="download the file again: it is truncated",
            )
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
