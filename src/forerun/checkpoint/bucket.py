"""Checkpoints below a prefix of a Google Cloud Storage bucket, through gcsfs (as Orbax itself reaches it)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from forerun.checkpoint.patience import NONE, Away, Patience, patiently
from forerun.checkpoint.quiet import quiet_bucket
from forerun.errors import UserError

T = TypeVar("T")

_SERVER_REFUSED = 412  # the object exists already
_SILENT_SECONDS = 60  # a connection on which nothing moves for so long is given up, and tried again
_AGAIN = {408, 429, 500, 502, 503, 504}
# What TensorStore says of a network's trouble, in the text of a ValueError. It has tried 32 times by then.
_TROUBLE = (
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "CURL error", "All retry attempts failed"),
    *("HTTP response code: 5", "HTTP response code: 429", "HTTP response code: 408"),
)


class Bucket:
    """An object is whole or absent, and created once: the precondition `ifGenerationMatch=0` is the store's own."""

    def __init__(
        self, address: str, patience: Patience = NONE, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self.address = address.rstrip("/")
        self.patience: Patience | None = patience
        self._tell = tell
        self._top = self.address.removeprefix("gs://")
        try:
            gcsfs: Any = importlib.import_module("gcsfs")
        except ImportError as error:
            raise UserError(
                f"{address} cannot be opened", why="the package gcsfs is missing", fix="pip install gcsfs"
            ) from error
        quiet_bucket()
        _give_up_silent_connections()
        self._store = gcsfs.GCSFileSystem(use_listings_cache=False)

    def patiently(self, call: Callable[[], T]) -> T:
        def tried() -> T:
            with _transient_as_away(self.address):
                return call()

        return patiently(tried, self.patience or NONE, self._tell)

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
        """There are none, but a bucket that does not answer is found here, before Orbax begins."""
        self.names(name)

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
def _transient_as_away(name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_transient(error):
            raise
        why = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        fix = "nothing, if the network or the bucket's service is down: the same command goes on when it is back"
        raise Away(f"the bucket of {name} does not answer", why=why, fix=fix) from error


@contextmanager
def _as_os_errors(name: str) -> Iterator[None]:
    """gcsfs has exceptions of its own for what a disk would report as an `OSError`."""
    try:
        with _transient_as_away(name):
            yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(0, f"the bucket answered: {str(error)[:200]}", name) from error


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: the network's trouble or the service's, not ours."""
    retry: Any = importlib.import_module("gcsfs.retry")
    if isinstance(error, retry.HttpError):
        return str(error.code).isdigit() and (int(error.code) in _AGAIN or retry.is_retriable(error))
    if type(error).__module__.startswith("jax"):  # a device's memory is exhausted too
        return False
    if isinstance(error, ConnectionError | TimeoutError) or retry.is_retriable(error):
        return True
    return any(words in str(error) for words in _TROUBLE)


def _give_up_silent_connections() -> None:
    """By default TensorStore waits for ever on a connection that stays open without a byte, and gcsfs 5 minutes, six
    times. Both are set before their first connection."""
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_SILENT_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(_SILENT_SECONDS))
    aiohttp: Any = importlib.import_module("aiohttp")
    settings: dict[str, Any] = importlib.import_module("fsspec.config").conf  # also for the file system Orbax opens
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    settings.setdefault("gcs", {}).setdefault("requests_timeout", timeout)
