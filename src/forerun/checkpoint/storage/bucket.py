"""Storage below a prefix of a Google Cloud Storage bucket. It uses gcsfs, as Orbax does."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from forerun.checkpoint.orbax_logs import quiet_bucket
from forerun.checkpoint.storage.retries import NONE, RetrySchedule, StorageUnavailable, with_retries
from forerun.errors import UserError
from forerun.storage.address import Address

T = TypeVar("T")

_PRECONDITION_FAILED = 412  # HTTP status if the object exists already
_SILENT_SECONDS = 60  # a connection without any data for this long is closed, and the request is tried again
_TRANSIENT_STATUSES = {408, 429, 500, 502, 503, 504}  # HTTP statuses of temporary failures
# Texts of a ValueError with which TensorStore reports network faults, after it has tried 32 times.
_TRANSIENT_TEXTS = (
    *("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "CURL error", "All retry attempts failed"),
    *("HTTP response code: 5", "HTTP response code: 429", "HTTP response code: 408"),
)


class Bucket:
    """A prefix of a bucket. The service itself creates objects atomically (precondition `ifGenerationMatch=0`)."""

    def __init__(
        self, address: str, patience: RetrySchedule = NONE, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self.address = address.rstrip("/")
        self.patience: RetrySchedule | None = patience
        self._tell = tell
        self._top = Address.of(self.address).rest
        try:
            gcsfs: Any = importlib.import_module("gcsfs")
        except ImportError as error:
            raise UserError(
                "E-CHECKPOINT-001",
                f"{address} cannot be opened",
                why="the package gcsfs is missing",
                fix="pip install gcsfs",
            ) from error
        quiet_bucket()
        _give_up_silent_connections()
        self._store = gcsfs.GCSFileSystem(use_listings_cache=False)

    def with_retries(self, call: Callable[[], T]) -> T:
        def tried() -> T:
            with _transient_as_away(self.address):
                return call()

        return with_retries(tried, self.patience or NONE, self._tell)

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
        """Create an object. Return False if another process has created it.

        If the response to a successful request is lost, gcsfs repeats the request, which then fails because the object
        exists. Equal content shows that it was written by this call.
        """
        with _as_os_errors(name):
            try:
                self._store.pipe_file(self._path(name), body, mode="create")
            except FileExistsError:
                return self.read(name) == body
            except Exception as error:
                if getattr(error, "code", None) != _PRECONDITION_FAILED and str(_PRECONDITION_FAILED) not in str(error):
                    raise
                return self.read(name) == body
        return True

    def require_folders(self, name: str) -> None:
        """Raise OSError if the bucket does not answer, before Orbax begins. A bucket needs no folders."""
        self.names(name)

    def flush(self, folder: str) -> None:
        """Do nothing: every object that exists is durable."""

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
    """Raise temporary failures as `StorageUnavailable`, and other exceptions unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_transient(error):
            raise
        why = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        fix = "wait until the network and the service of the bucket work, then run the same command again"
        raise StorageUnavailable(
            "E-CHECKPOINT-015", f"the bucket of {name} does not answer", why=why, fix=fix
        ) from error


@contextmanager
def _as_os_errors(name: str) -> Iterator[None]:
    """Raise exceptions of gcsfs as `OSError`, like those of a disk. Temporary ones become `StorageUnavailable`."""
    try:
        with _transient_as_away(name):
            yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(0, f"the bucket answered: {str(error)[:200]}", name) from error


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later, because the network or the service failed."""
    retry: Any = importlib.import_module("gcsfs.retry")
    if isinstance(error, retry.HttpError):
        return str(error.code).isdigit() and (int(error.code) in _TRANSIENT_STATUSES or retry.is_retriable(error))
    if type(error).__module__.startswith("jax"):  # jax reports a full device with RESOURCE_EXHAUSTED
        return False
    if isinstance(error, ConnectionError | TimeoutError) or retry.is_retriable(error):
        return True
    return any(words in str(error) for words in _TRANSIENT_TEXTS)


def _give_up_silent_connections() -> None:
    """Set the timeouts of TensorStore and gcsfs. This must run before their first connection.

    By default, TensorStore waits forever on an open connection without data, and gcsfs waits six times 5 minutes.
    """
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(_SILENT_SECONDS))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(_SILENT_SECONDS))
    aiohttp: Any = importlib.import_module("aiohttp")
    settings: dict[str, Any] = importlib.import_module("fsspec.config").conf  # also for the file system Orbax opens
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    settings.setdefault("gcs", {}).setdefault("requests_timeout", timeout)
