"""Folders of immutable files: on this machine, or below a prefix of a bucket (`bucket.py`).

Code above does not depend on the kind of folder. Two operations carry the guarantees of a token store:

- `create` makes a file visible with its complete content, or not at all. If several processes create one name, exactly
  one succeeds.
- `read_ranges` returns exactly the requested bytes. Whether they are the right ones is decided by checksums, in
  `block_reader.py`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forerun.data.storage.file_range import FileRange as FileRange
from forerun.files import sync_folder
from forerun.storage.address import Address


class StoreFolder(Protocol):
    """A folder of immutable files. Names are relative to it, with `/` between their parts.

    A name that does not exist raises FileNotFoundError. Other failures are OSError; those of a bucket that may succeed
    later are StorageError.
    """

    @property
    def address(self) -> str:
        """The path or the address, as users write it."""

    @property
    def retries(self) -> int:
        """Requests of this process that the driver of a bucket repeated."""

    @property
    def is_local(self) -> bool:
        """Whether the folder is on this machine. Its path is then `Path(address)`."""

    def inside(self, name: str) -> StoreFolder:
        """Return the folder `name` in this folder."""

    def names(self) -> set[str]:
        """Return the names of the files and folders directly in this folder; none if it does not exist."""

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

    def create(self, name: str, content: bytes) -> bool:
        """Create a file atomically and durably. Return False, and change nothing, if the name exists.

        In a bucket, False may also mean that this call has created it and the answer was lost: compare the content.
        """

    def replace(self, name: str, content: bytes) -> None:
        """Write a file atomically, whether or not it exists."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content. Do nothing if it does not exist."""

    def require_writable(self) -> None:
        """Raise an error if no file can be created. A folder of this machine is created if it is missing."""


def place_of(folder: StoreFolder) -> Path | str:
    """Return the path of a folder of this machine, or the address of a bucket, as the Python API gives it to users."""
    return Path(folder.address) if folder.is_local else folder.address


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
    """A folder of this machine."""

    path: Path

    @property
    def address(self) -> str:
        return str(self.path)

    @property
    def is_local(self) -> bool:
        return True

    @property
    def retries(self) -> int:
        return 0

    def inside(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def names(self) -> set[str]:
        try:
            return set(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def files(self) -> set[str]:
        walked = os.walk(self.path)
        return {os.path.relpath(os.path.join(folder, name), self.path) for folder, _, names in walked for name in names}

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for name in names:
            try:
                found.append(self.read(name))
            except FileNotFoundError:
                found.append(None)
        return found

    def read_ranges(self, ranges: Sequence[FileRange]) -> list[bytes]:
        found = []
        for name, start, stop in ranges:
            with open(self.path / name, "rb") as file:
                file.seek(start)
                found.append(file.read(stop - start))
        return found

    def create(self, name: str, content: bytes) -> bool:
        part = self._written(name, content)
        try:
            os.link(part, self.path / name)  # fails if the name exists
        except FileExistsError:
            return False
        finally:
            with suppress(OSError):
                part.unlink()
        sync_folder((self.path / name).parent)
        return True

    def replace(self, name: str, content: bytes) -> None:
        os.replace(self._written(name, content), self.path / name)
        sync_folder((self.path / name).parent)

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def require_writable(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def _written(self, name: str, content: bytes) -> Path:
        """Write the content to a temporary file next to `name`, flush it to the disk, and return its path."""
        final = self.path / name
        final.parent.mkdir(parents=True, exist_ok=True)
        part = final.with_name(f"{final.name}.{secrets.token_hex(4)}.part")
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return part
