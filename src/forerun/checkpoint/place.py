"""Where checkpoints lie: a folder of this machine, or (`forerun.checkpoint.bucket`) a prefix of an object store.

Both offer the same few operations, so that everything above is written once. The one that everything else stands on
is `create`: of several processes that create the same name, exactly one succeeds, and a kill at any moment leaves the
name either absent or whole.
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

from forerun.checkpoint.patience import NONE, Patience
from forerun.errors import UserError
from forerun.files import sync_folder
from forerun.units import MIB

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
PART = ".part"
_BLOCK_BYTES = MIB

T = TypeVar("T")


class Place(Protocol):
    """Names are relative, with `/` between their parts."""

    @property
    def address(self) -> str:
        """As Orbax and people take it."""

    @property
    def patience(self) -> Patience | None:
        """How long faults of a network are waited out; None where there is no network."""

    def patiently(self, call: Callable[[], T]) -> T:
        """What `call` returns, tried again while the place does not answer (`Away`)."""

    def names(self, folder: str = "") -> list[str]:
        """What is directly in the folder; nothing if there is no such folder."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Every file below the folder, by its name relative to it."""

    def read(self, name: str) -> bytes: ...

    def blocks(self, name: str, start: int, count: int) -> Iterator[bytes | memoryview]:
        """The bytes from `start`, at most `count`; a block is valid until the next one is asked for."""

    def create(self, name: str, body: bytes) -> bool:
        """False if the name is there already. Durable when it returns."""

    def require_folders(self, name: str) -> None:
        """Raise if folders cannot be made. Orbax makes them in the background, and if it cannot, threads of its own
        wait for them for 20 minutes, and the end of the process for these threads."""

    def flush(self, folder: str) -> None:
        """Return when every file below the folder would survive a loss of power."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all that is in it; nothing happens if it is not there."""

    def room_bytes(self) -> int | None:
        """Free space, or None where there is no such thing."""


def place_of(folder: Path | str, patience: Patience = NONE, tell: Callable[[str], None] = lambda text: None) -> Place:
    """`tell` gets a line for each try that failed, from the thread that made it."""
    if str(folder).startswith("gs://"):
        from forerun.checkpoint.bucket import Bucket

        return Bucket(str(folder), patience, tell)
    if "://" in str(folder):
        raise UserError(
            f"checkpoints cannot be written to {folder}",
            why="they go to a folder or to a bucket of Google Cloud Storage",
            fix="give a folder, or gs://bucket/folder",
        )
    return Local(Path(folder))


class Local:
    """A full disk or a broken one is told at once: to wait would not mend it."""

    patience: Patience | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def patiently(self, call: Callable[[], T]) -> T:
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
                # No hard links here (FUSE, FAT): a kill while writing leaves half a record, which its digest shows.
                try:
                    _write(final, body)
                except FileExistsError:
                    return False
            try:
                sync_folder(final.parent)
            except OSError:
                final.unlink()  # whether it would last is not known: it shall not be there
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
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(there).free


def _write(path: Path, body: bytes) -> None:
    """A new file, on the disk when this returns; no part of it stays if that fails."""
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
