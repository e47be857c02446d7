"""Storage places of checkpoints: a folder of this machine, or a prefix of an object store (`bucket.py`).

Both have the same few operations, so that the code above does not depend on the kind of storage. The most important one
is `create`. If several processes create the same name, exactly one succeeds. After a kill at any moment, the name
either does not exist or has its complete content.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from forerun.checkpoint.storage.retries import NONE, RetrySchedule
from forerun.errors import UserError
from forerun.files import sync_folder
from forerun.storage.address import Address
from forerun.units import MIB

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
PART = ".part"
_BLOCK_BYTES = MIB

T = TypeVar("T")


class StoragePlace(Protocol):
    """A place for files. Names are relative to it, with `/` between their parts."""

    @property
    def address(self) -> str:
        """The address of the place, as Orbax accepts it and users write it."""

    @property
    def patience(self) -> RetrySchedule | None:
        """The schedule of retries after network faults; None if the place does not use the network."""

    def with_retries(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which is repeated while the place does not answer (`StorageUnavailable`)."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly in the folder, sorted; an empty list if it does not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every file below the folder, by its name relative to the folder."""

    def read(self, name: str) -> bytes: ...

    def blocks(self, name: str, start: int, count: int) -> Iterator[bytes | memoryview]:
        """Yield at most `count` bytes from `start` on, in blocks. A block is valid until the next one is requested."""

    def create(self, name: str, body: bytes) -> bool:
        """Create a file atomically. Return False if the name exists. The file is durable when this returns."""

    def require_folders(self, name: str) -> None:
        """Raise OSError if folders cannot be created.

        Orbax creates folders in the background. If it cannot, its threads wait for them for 20 minutes, and the process
        cannot end before these threads.
        """

    def flush(self, folder: str) -> None:
        """Make every file below the folder durable, so that it survives a power failure."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content. Do nothing if it does not exist."""

    def room_bytes(self) -> int | None:
        """Return the free space, or None if the place has no limit."""


def place_of(
    folder: Path | str, patience: RetrySchedule = NONE, tell: Callable[[str], None] = lambda text: None
) -> StoragePlace:
    """Return the storage place for a folder or a bucket.

    Args:
      folder: a path, or an address such as `gs://bucket/folder`.
      patience: the schedule of retries; for buckets only.
      tell: receives a line for each failed try, in the thread that made it.

    Raises:
      UserError: the address is of another kind, or the package for buckets is missing.
    """
    if Address.of(folder).protocol == "gs":
        from forerun.checkpoint.storage.bucket import Bucket

        return Bucket(str(folder), patience, tell)
    if Address.of(folder).is_remote:
        raise UserError(
            "E-CHECKPOINT-002",
            f"checkpoints cannot be written to {folder}",
            why="forerun writes checkpoints to a folder or to a bucket of Google Cloud Storage",
            fix="give a folder, or gs://bucket/folder",
        )
    return Local(Path(folder))


class Local:
    """A folder of this machine. Errors of the disk are raised immediately, because waiting would not help."""

    patience: RetrySchedule | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def with_retries(self, call: Callable[[], T]) -> T:
        return call()

    @property
    def address(self) -> str:
        return str(self.folder)

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.folder / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        top = self.folder / folder
        found = {}
        for path, _, files in os.walk(top, onerror=_raise):
            for name in files:
                file = Path(path, name)
                found[file.relative_to(top).as_posix()] = file.lstat().st_size
        return found

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def blocks(self, name: str, start: int, count: int) -> Iterator[bytes | memoryview]:
        block = memoryview(bytearray(min(count, _BLOCK_BYTES)))
        with open(self.folder / name, "rb", buffering=0) as file:
            file.seek(start)
            while count and (got := file.readinto(block[: min(count, len(block))])):
                count -= got
                yield block[:got]

    def create(self, name: str, body: bytes) -> bool:
        final = self.folder / name
        final.parent.mkdir(parents=True, exist_ok=True)
        # A hard link fails if the name exists, and its file is complete from the start.
        part = final.with_name(f"{final.name}.{secrets.token_hex(4)}{PART}")
        try:
            _write(part, body)
            try:
                os.link(part, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # This file system has no hard links (FUSE, FAT). A kill during the write leaves an incomplete record,
                # which is detected by its digest.
                try:
                    _write(final, body)
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

    def require_folders(self, name: str) -> None:
        outer = self.folder / f"{name}{PART}"
        outer.mkdir(parents=True)
        try:
            (outer / "inner").mkdir()
            (outer / "inner").rmdir()
        finally:
            outer.rmdir()

    def flush(self, folder: str) -> None:
        for path, _, files in os.walk(self.folder / folder, onerror=_raise):
            for name in files:
                _sync(Path(path, name))
            sync_folder(Path(path))
        sync_folder(self.folder)

    def remove(self, name: str) -> None:
        path = self.folder / name
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(path)
        sync_folder(path.parent)

    def room_bytes(self) -> int | None:
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(existing).free


def _write(path: Path, body: bytes) -> None:
    """Write a new file and flush it to the disk. If that fails, remove it."""
    with open(path, "xb", buffering=0) as file:
        try:
            view = memoryview(body)
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
