"""Folders of files: on this machine, or below a prefix of a bucket (`bucket.py`).

Code above does not depend on the kind of folder. Two operations carry the guarantees of token stores, checkpoints and
records of cloud runs:

- `create` makes a file visible with its complete content, or not at all. If several processes create one name, exactly
  one succeeds.
- `read_ranges` returns exactly the requested bytes. Whether they are the right ones is decided by checksums.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from forerun.files import PART as PART
from forerun.files import sync_folder
from forerun.storage.address import Address
from forerun.storage.retries import RetrySchedule
from forerun.units import MIB

T = TypeVar("T")

BLOCK_BYTES = MIB  # read at a time from a file of this machine
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class FileRange(NamedTuple):
    """The bytes `start` .. `stop - 1` of the file `name`."""

    name: str
    start: int
    stop: int


class Folder(Protocol):
    """A folder of files. Names are relative to it, with `/` between their parts.

    A name that does not exist raises FileNotFoundError. Other failures of a disk are OSError. Those of a bucket are
    UserError, or `StorageUnavailable` if the same call may succeed later.
    """

    @property
    def address(self) -> str:
        """The path or the address, as users write it."""

    @property
    def location(self) -> Path | str:
        """The path of a folder of this machine, or the address of a bucket, as the Python API gives it to users."""

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine. Its path is then `Path(address)`."""

    @property
    def schedule(self) -> RetrySchedule | None:
        """The schedule of `with_retries`; None for a folder of this machine."""

    @property
    def repeated_requests(self) -> int:
        """Requests of this process that the driver of a bucket repeated."""

    def with_retries(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which is repeated while the bucket does not answer."""

    def inside(self, name: str) -> Folder:
        """Return the folder `name` in this folder."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders directly in a folder, sorted; none if it does not exist."""

    def files(self) -> set[str]:
        """Return the names of all files below this folder, by one listing; none if it does not exist."""

    def exists(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    def read(self, name: str) -> bytes: ...

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the content of each file, or None if it does not exist. A bucket is asked for many at a time."""

    def read_ranges(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """Return the bytes of each range. A bucket is asked for all of them at the same time.

        If a file ends before its range does, fewer bytes are returned.
        """

    def blocks(self, name: str, start: int, count: int) -> Iterator[bytes | memoryview]:
        """Yield `count` bytes from `start` on, in blocks; fewer if the file ends before.

        A block is valid until the next one is requested.
        """

    def create(self, name: str, content: bytes) -> bool:
        """Create a file atomically and durably. Return False, and change nothing, if the name exists.

        In a bucket, False may also mean that this call has created it and the answer was lost: compare the content,
        for example with `create_once`.
        """

    def replace(self, name: str, content: bytes) -> None:
        """Write a file atomically, whether or not it exists."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content. Do nothing if it does not exist."""

    def require_writable(self) -> None:
        """Raise an error if no file can be created. A folder of this machine is created if it is missing."""

    def require_folders(self, name: str) -> None:
        """Raise an error if the folder `name` and folders in it could not be created. Nothing is left of the check."""

    def flush(self, name: str) -> None:
        """Make every file below the folder `name` durable, so that it survives a power failure."""


def create_once(folder: Folder, name: str, content: bytes) -> bool:
    """Create a file, like `Folder.create`. Return True also if it exists with this content.

    If the answer to a successful request is lost, the driver of a bucket repeats the request, which is then refused.
    Equal content shows that this call has written the file, if the content is unique, such as a random token.
    """
    return folder.create(name, content) or folder.read_many([name]) == [content]


def remove_command(address: str, *, whole_folder: bool) -> str:
    """Return the command that removes a file or a folder, for fixes of errors."""
    protocol = Address.of(address).protocol
    if protocol == "gs":
        return f"gcloud storage rm {'-r ' * whole_folder}{address}"
    if protocol == "s3":
        return f"aws s3 rm {'--recursive ' * whole_folder}{address}"
    return f"rm {'-r ' * whole_folder}{address}"


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine. Errors of the disk are raised immediately, because waiting would not help."""

    path: Path

    @property
    def address(self) -> str:
        return str(self.path)

    @property
    def location(self) -> Path | str:
        return self.path

    @property
    def is_local(self) -> bool:
        return True

    @property
    def schedule(self) -> RetrySchedule | None:
        return None

    @property
    def repeated_requests(self) -> int:
        return 0

    def with_retries(self, call: Callable[[], T]) -> T:
        return call()

    def inside(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self) -> set[str]:
        return {path.relative_to(self.path).as_posix() for path in self._paths("")}

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        contents: list[bytes | None] = []
        for name in names:
            try:
                contents.append(self.read(name))
            except FileNotFoundError:
                contents.append(None)
        return contents

    def read_ranges(self, ranges: Sequence[FileRange]) -> list[bytes]:
        contents = []
        for name, start, stop in ranges:
            with open(self.path / name, "rb") as file:
                file.seek(start)
                contents.append(file.read(stop - start))
        return contents

    def blocks(self, name: str, start: int, count: int) -> Iterator[bytes | memoryview]:
        block = memoryview(bytearray(min(count, BLOCK_BYTES)))
        with open(self.path / name, "rb", buffering=0) as file:
            file.seek(start)
            while count and (size := file.readinto(block[: min(count, len(block))])):
                count -= size
                yield block[:size]

    def create(self, name: str, content: bytes) -> bool:
        final = self.path / name
        part = _part_of(final)
        try:
            _write(part, content)
            try:
                os.link(part, final)  # fails if the name exists, and the file is complete from the start
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # This file system has no hard links (FUSE, FAT). A kill during the write leaves an incomplete file,
                # which readers detect by its digest.
                try:
                    _write(final, content)
                except FileExistsError:
                    return False
            try:
                sync_folder(final.parent)
            except OSError:
                final.unlink()  # it may not survive a power failure, so it must not count as created
                raise
            return True
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def replace(self, name: str, content: bytes) -> None:
        final = self.path / name
        part = _part_of(final)
        _write(part, content)
        os.replace(part, final)
        sync_folder(final.parent)

    def remove(self, name: str) -> None:
        path = self.path / name
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            while path.exists():
                with suppress(FileNotFoundError):  # another process removes the same folder
                    shutil.rmtree(path)
        sync_folder(path.parent)

    def require_writable(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def require_folders(self, name: str) -> None:
        outer = self.path / f"{name}{PART}"
        outer.mkdir(parents=True)
        try:
            (outer / "inner").mkdir()
            (outer / "inner").rmdir()
        finally:
            outer.rmdir()

    def flush(self, name: str) -> None:
        for folder, _, names in os.walk(self.path / name, onerror=_raise):
            for file in names:
                _sync(Path(folder, file))
            sync_folder(Path(folder))
        sync_folder(self.path)

    def free_bytes(self) -> int:
        """Return the free space of the disk."""
        existing = next(path for path in (self.path.absolute(), *self.path.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def used_bytes(self, block_bytes: int) -> int:
        """Return the size of all files, each rounded up to blocks of the disk."""
        return sum(-(-path.lstat().st_size // block_bytes) * block_bytes for path in self._paths(""))

    def _paths(self, name: str) -> Iterator[Path]:
        """Yield the path of each file below the folder `name`. Folders that vanish meanwhile are skipped."""

        def raise_unless_missing(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        for folder, _, names in os.walk(self.path / name, onerror=raise_unless_missing):
            yield from (Path(folder, file) for file in names)


def _part_of(final: Path) -> Path:
    """Return the path of a new temporary file, and create its folder."""
    final.parent.mkdir(parents=True, exist_ok=True)
    return final.with_name(f"{final.name}.{secrets.token_hex(4)}{PART}")


def _write(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk. If that fails, remove it."""
    with open(path, "xb", buffering=0) as file:
        try:
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
