"""The bucket: a folder in memory, as each process sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.errors import StorageError

if TYPE_CHECKING:
    from simulation.process import Process

FOLDER = "gs://sim/run"


def storage_error(why: str) -> StorageError:
    return StorageError("E-DATA-172", "the bucket does not answer", why=why, fix="try again")


class Bucket:
    """The objects of the run's folder by their names."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def record(self) -> list[str]:
        """Return the names of the files of the record, in the order of their creation."""
        return [name for name in self.contents if name.startswith("cloud/")]


class BucketFolder:
    """A folder of the bucket as one process uses it. Implements `forerun.storage.folder.Folder`."""

    is_local, retries = False, 0

    def __init__(self, bucket: Bucket, process: Process, prefix: str = "") -> None:
        self.bucket, self.process, self.prefix = bucket, process, prefix

    @property
    def address(self) -> str:
        return f"{FOLDER}/{self.prefix}".rstrip("/")

    def inside(self, name: str) -> BucketFolder:
        return BucketFolder(self.bucket, self.process, f"{self.prefix}{name}/")

    def files(self) -> set[str]:
        self.process.call("bucket")
        start = len(self.prefix)
        return {name[start:] for name in self.bucket.contents if name.startswith(self.prefix)}

    def names(self) -> set[str]:
        return {name.split("/", 1)[0] for name in self.files()}

    def exists(self, name: str) -> bool:
        self.process.call("bucket")
        return self.prefix + name in self.bucket.contents

    def read(self, name: str) -> bytes:
        (content,) = self.read_many([name])
        if content is None:
            raise FileNotFoundError(name)
        return content

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        self.process.call("bucket")
        return [self.bucket.contents.get(self.prefix + name) for name in names]

    def create(self, name: str, content: bytes) -> bool:
        return self._write(name, content, is_new=True)

    def replace(self, name: str, content: bytes) -> None:
        self._write(name, content, is_new=False)

    def remove(self, name: str) -> None:
        self.process.call("bucket")
        self.bucket.contents.pop(self.prefix + name, None)

    def require_writable(self) -> None:
        self.process.call("bucket")

    def _write(self, name: str, content: bytes, *, is_new: bool) -> bool:
        self.process.call("bucket")
        path = self.prefix + name
        delay = self.process.late_seconds()
        if delay is not None:  # the answer is lost, and the write takes effect later
            self.process.world.after(delay, lambda: self._apply(path, content, is_new=is_new))
            raise storage_error("the answer did not arrive")
        is_changed = self._apply(path, content, is_new=is_new)
        self.process.answer("bucket")
        return is_changed

    def _apply(self, path: str, content: bytes, *, is_new: bool) -> bool:
        if is_new and path in self.bucket.contents:
            return False
        self.bucket.contents[path] = content
        return True
