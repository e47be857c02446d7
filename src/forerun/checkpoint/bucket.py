"""Checkpoints below a prefix of a Google Cloud Storage bucket, through gcsfs (as Orbax itself reaches it)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forerun.errors import UserError

_SERVER_REFUSED = 412  # the object exists already


class Bucket:
    """An object is whole or absent, and created once: the precondition `ifGenerationMatch=0` is the store's own."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._top = self.address.removeprefix("gs://")
        try:
            gcsfs: Any = importlib.import_module("gcsfs")
        except ImportError as error:
            raise UserError(
                f"{address} cannot be opened", why="the package gcsfs is missing", fix="pip install gcsfs"
            ) from error
        self._store = gcsfs.GCSFileSystem(use_listings_cache=False)

    def names(self, folder: str = "") -> list[str]:
        top = self._path(folder)
        with _as_os_errors(top):
            try:
                found = self._store.ls(top, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        inside = (name.removeprefix(f"{top}/") for name in found if name.startswith(f"{top}/"))
        return sorted({name.rstrip("/") for name in inside if name})

    def sizes(self, folder: str) -> dict[str, int]:
        top = self._path(folder)
        with _as_os_errors(top):
            found = self._store.find(top, detail=True, refresh=True)
        inside = {name.removeprefix(f"{top}/"): about for name, about in found.items() if name.startswith(f"{top}/")}
        return {name: int(about["size"]) for name, about in inside.items() if not name.endswith("/")}

    def read(self, name: str) -> bytes:
        with _as_os_errors(name):
            return bytes(self._store.cat_file(self._path(name)))

    def blocks(self, name: str, start: int, count: int) -> Iterator[bytes | memoryview]:
        with _as_os_errors(name):
            size = int(self._store.info(self._path(name))["size"])
            stop = min(start + count, size)
            body = self._store.cat_file(self._path(name), start=start, end=stop) if start < stop else b""
        yield body

    def create(self, name: str, body: bytes) -> bool:
        """An answer that was lost makes gcsfs ask again and be refused: then what is there says who wrote it."""
        with _as_os_errors(name):
            try:
                self._store.pipe_file(self._path(name), body, mode="create")
            except FileExistsError:
                return self.read(name) == body
            except Exception as error:
                if getattr(error, "code", None) != _SERVER_REFUSED and str(_SERVER_REFUSED) not in str(error):
                    raise
                return self.read(name) == body
        return True

    def require_folders(self, name: str) -> None:
        """There are none."""

    def flush(self, folder: str) -> None:
        """An object that is there is durable."""

    def remove(self, name: str) -> None:
        with _as_os_errors(name):
            try:
                self._store.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

    def room_bytes(self) -> int | None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._top}/{name}".rstrip("/")


@contextmanager
def _as_os_errors(name: str) -> Iterator[None]:
    """gcsfs has exceptions of its own for what a disk would report as an `OSError`."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(0, f"the bucket answered: {str(error)[:200]}", name) from error
