"""What forerun changes in Orbax: its files and arrays in buckets, its logs, and threads that a failed save leaves.

Orbax 0.12 has two ways to a bucket. Small files go through `etils.epath`, which needs gcsfs or s3fs. Arrays go through
TensorStore, but only on Google Cloud Storage (https://github.com/google/orbax/pull/2739). Both are replaced here, so
gs:// and s3:// need the same driver, the same credentials and no other package.

The errors of Orbax are raised as exceptions, which forerun reports. Its logs (hundreds of lines for one full disk)
would hide these reports.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import io
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from orbax.checkpoint import v1 as orbax

from forerun.checkpoint import hosts
from forerun.errors import UserError
from forerun.storage.address import BUCKET_PROTOCOLS, Address
from forerun.storage.bucket import DRIVERS, BucketFolder, kvstore_spec
from forerun.storage.folder import Folder
from forerun.storage.retries import ARRAY_RETRIES
from forerun.units import MIB

# As Orbax has for Google Cloud Storage. S3 accepts at most 5 GB in one request.
_FILE_BYTES = 400 * MIB
_LARGEST_CHUNK_BYTES = 1024 * MIB


# Warnings about coroutines of Orbax that a failed save did not start.
_UNSTARTED_COROUTINE = (
    "coroutine '(_create_paths|cancellable|_?(async_)?serialize|BasePyTree|_write_metadata|"
    ".*_serialize_without_dispatcher).*was never awaited"
)


def orbax_context(storage: Folder) -> orbax.Context:
    """Return the settings of Orbax for checkpoints in this folder."""
    context = orbax.Context()
    context.multiprocessing.active_processes = hosts.all_hosts()
    if not storage.is_local:
        use_buckets()
        # A bucket cannot rename. A file at the end of a save says that it is complete.
        context.atomicity.mode = orbax.options.AtomicityMode.COMMIT_FILE
        context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
        context.array.saving.storage_options.chunk_byte_size = _LARGEST_CHUNK_BYTES
    return context


@cache
def use_buckets() -> None:
    """Let Orbax read and write buckets through `forerun.storage`. Does nothing after the first call.

    Raises:
      UserError: this version of Orbax builds the specs of its arrays differently.
    """
    try:
        module: Any = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
        build_spec = module.build_kvstore_tspec
        epath: Any = importlib.import_module("etils.epath")
        path_class = importlib.import_module("etils.epath.gpath").PosixGPath
    except (ImportError, AttributeError) as error:
        raise UserError(
            "E-CHECKPOINT-018",
            "checkpoints in a bucket are not possible with this version of orbax-checkpoint",
            why=f"forerun replaces a function that this version does not have: {error}",
            fix="pip install 'orbax-checkpoint>=0.12.8,<0.13', or remove checkpoint.folder",
        ) from error

    def build_kvstore_spec(directory: str, *arguments: Any, **keywords: Any) -> Any:
        """Return the spec for a folder. Orbax gets the address of a bucket as one of Google Cloud Storage."""
        address = Address.of(directory)
        if not address.is_bucket:
            return build_spec(directory, *arguments, **keywords)
        return _with_own_specs(
            build_spec(str(Address("gs", address.rest)), *arguments, **keywords), address.protocol or ""
        )

    module.build_kvstore_tspec = build_kvstore_spec

    class BucketPath(path_class):  # type: ignore[misc, valid-type]
        """A path in a bucket, with the methods of `pathlib.Path`."""

        _backend = _Backend()

    epath.register_path_cls([f"{Address(protocol, '')}" for protocol in BUCKET_PROTOCOLS])(BucketPath)


def _with_own_specs(spec: Any, protocol: str) -> Any:
    """Return a copy of a TensorStore spec in which the key-value stores of a bucket are those of `forerun.storage`."""
    if isinstance(spec, list):
        return [_with_own_specs(item, protocol) for item in spec]
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") != DRIVERS["gs"]:
        return {key: _with_own_specs(value, protocol) for key, value in spec.items()}
    driver = DRIVERS[protocol]
    own = kvstore_spec(str(Address(protocol, f"{spec['bucket']}/{spec.get('path', '')}")))
    return own | {"context": {f"{driver}_request_retries": ARRAY_RETRIES}}


class _Backend:
    """The file operations of `etils.epath` that Orbax uses, on buckets. A folder exists if a file is in it."""

    @contextmanager
    def open(self, path: str, mode: str) -> Iterator[IO[Any]]:
        folder, name = _split(path)
        if "r" in mode:
            content = folder.read(name)
            yield io.BytesIO(content) if "b" in mode else io.StringIO(content.decode())
            return
        if "w" not in mode:
            raise NotImplementedError(f"mode {mode} of a file in a bucket")
        file: IO[Any] = io.BytesIO() if "b" in mode else io.StringIO()
        yield file
        content = file.getvalue()  # type: ignore[attr-defined]
        folder.replace(name, content if isinstance(content, bytes) else content.encode())

    def exists(self, path: str) -> bool:
        folder, name = _split(path)
        return not name or folder.exists(name) or self.isdir(path)

    def isdir(self, path: str) -> bool:
        folder, name = _split(path)
        return not name or bool(folder.names(name))

    def listdir(self, path: str) -> list[str]:
        folder, name = _split(path)
        return folder.names(name)

    def glob(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern with wildcards after its last slash."""
        top, _, name = pattern.rpartition("/")
        return [f"{top}/{found}" for found in fnmatch.filter(self.listdir(top), name)]

    def mkdir(self, path: str, *, exist_ok: bool = False, mode: int | None = None) -> None:
        if not exist_ok and self.exists(path):
            raise FileExistsError(0, "it exists", path)

    makedirs = mkdir

    def remove(self, path: str) -> None:
        folder, name = _split(path)
        if not folder.exists(name):
            raise FileNotFoundError(0, "it does not exist", path)
        folder.remove(name)

    def rmtree(self, path: str) -> None:
        folder, name = _split(path)
        folder.remove(name)


def _split(path: str) -> tuple[BucketFolder, str]:
    """Return the bucket of a path, and the name of the object in it."""
    address = Address.of(path)
    return BucketFolder(str(Address(address.protocol, address.bucket))), address.prefix.rstrip("/")


# ---- Logs, and leftovers of failed saves ----


def quiet_orbax() -> None:
    """Suppress the logs of Orbax, and what its late writes report after their save has failed.

    These writes find the event loop of their save closed, or were never started.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    warnings.filterwarnings("ignore", _UNSTARTED_COROUTINE, RuntimeWarning)
    hook: Any = sys.unraisablehook
    if getattr(hook, "func", None) is not _report_unless_late:
        sys.unraisablehook = partial(_report_unless_late, hook)


def forget(response: Any) -> None:
    """Close the coroutine of a failed save that Orbax did not start. Python would warn that it was never awaited."""
    coroutine = getattr(response, "_background_awaitable", None)
    with suppress(RuntimeError, ValueError):  # the coroutine ran or is running
        if inspect.iscoroutine(coroutine):
            coroutine.close()


def release() -> None:
    """End the threads of Orbax that wait for the folders of a failed save.

    They may wait for 5 minutes, and the process cannot end before them. Call this only on a single host, because the
    signals do not reach other hosts, and only while no other save is under way.
    """
    # These are private parts of Orbax. If a new version renames them, the process only ends later.
    with suppress(Exception):
        from orbax.checkpoint._src.futures.future import set_signals

        for thread in threading.enumerate():
            if type(thread).__name__ == "_SignalingThread":
                waiting: Any = thread
                waiting.cancel()
                set_signals(waiting._receive_signals, operation_id=waiting._operation_id)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts or record.levelno >= logging.CRITICAL


def _report_unless_late(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Pass an unraisable exception on to `hook`, unless it comes from a failed save of Orbax."""
    text = str(unraisable.exc_value)
    late = unraisable.object is None and text == "Event loop is closed"
    unbegun = isinstance(unraisable.exc_value, RuntimeWarning) and re.match(_UNSTARTED_COROUTINE, text)
    if not late and not unbegun:
        hook(unraisable)
