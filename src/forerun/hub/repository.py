"""A model or dataset repository on the hub: listing and downloading its files through the hub client.

The client has its own settings for cache, token, endpoint and offline mode (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from forerun.errors import StorageError, UserError
from forerun.hub.errors import RepositoryKind, status_of, to_user_error
from forerun.redirects import HttpxGuard
from forerun.reporter import SILENT
from forerun.storage.address import Address
from forerun.storage.retries import HUB_READS, StorageUnavailable, with_retries
from forerun.units import MIB, Bytes

# ---- The http client of the hub's library, with a check of redirects ----


def guard_client() -> None:
    """Make all requests of the hub's library check redirects. Repeating it changes nothing."""
    from huggingface_hub.utils import _http

    factory = _http._GLOBAL_CLIENT_FACTORY
    if getattr(factory, "checks_redirects", False):
        return

    def guarded() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], HttpxGuard()]}
        return client

    guarded.checks_redirects = True  # type: ignore[attr-defined]
    _http.set_client_factory(guarded)


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPARE_BYTES = 64 * MIB


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit."""

    commit: str
    sizes: dict[str, int]  # bytes of each file, by its path in the repository


@dataclass(frozen=True)
class Repository:
    """A repository `owner/name` on the hub."""

    name: str
    kind: RepositoryKind = "model"

    def listing(self, revision: str | None) -> Listing:
        """Return the files of the repository at `revision` (None: its default branch)."""
        import huggingface_hub

        guard_client()
        client = huggingface_hub.HfApi()
        ask: Callable[..., Any] = client.dataset_info if self.kind == "dataset" else client.model_info
        wait_seconds = huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
        try:
            about = ask(self.name, revision=revision, files_metadata=True, timeout=wait_seconds)
        except Exception as error:
            raise to_user_error(error, self.name, revision, downloading=False, kind=self.kind) from error
        if about.sha is None:
            raise RuntimeError(f"the hub names no commit for {self.name}")
        return Listing(about.sha, {file.rfilename: file.size or 0 for file in about.siblings or ()})

    def download(self, revision: str | None, files: list[str], *, local: bool = False) -> Path:
        """Download the files and return the folder of the snapshot. With `local`, use only the cache."""
        import huggingface_hub

        guard_client()
        try:
            folder = huggingface_hub.snapshot_download(
                self.name,
                repo_type=self.kind,
                revision=revision,
                allow_patterns=[_literal(file) for file in files],
                local_files_only=local,
            )
        except Exception as error:
            raise to_user_error(error, self.name, revision, downloading=True, kind=self.kind) from error
        return Path(folder)

    def is_cached(self, commit: str, file: str) -> bool:
        """Return whether a file is in the cache."""
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(self.name, file, revision=commit, repo_type=self.kind), str)

    def check_disk_space(self, commit: str, sizes: dict[str, int]) -> None:
        """Raise a StorageError if the cache's disk has too little space for files that are not cached yet."""
        from huggingface_hub import constants

        needed = sum(size for file, size in sizes.items() if not self.is_cached(commit, file))
        cache = Path(constants.HF_HUB_CACHE).expanduser()
        place = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
        if needed and needed + _SPARE_BYTES > free:
            less = ", or name fewer of its files in data.path" if self.kind == "dataset" else ""
            raise StorageError(
                "E-HUB-028",
                f"the disk has too little space for {self.name}",
                why=f"the download needs {Bytes(needed)}, and {cache} has {Bytes(free)} free",
                fix="free disk space (`hf cache ls` lists the cache), or set HF_HOME to a larger disk" + less,
            )


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_commit(revision: str | None) -> bool:
    """Return whether `revision` is a full commit hash, whose content never changes."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def _literal(name: str) -> str:
    """Return a glob pattern that matches only this name."""
    return re.sub(r"([*?[])", r"[\1]", name)


# ---- Files of a dataset on the hub that are read by byte ranges, without a download ----
#
# `RangeFiles` has the methods of an fsspec file system that data files use. The hub client sends the requests, with the
# token that it finds itself. Paths name a commit, so their content never changes: `datasets/owner/name@commit/file`.


STREAM_BLOCK_BYTES = 4 * MIB  # of files that are read from start to end


class RangeFiles:
    """Files of datasets, by paths such as `datasets/owner/name@commit/data/0.parquet`."""

    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """Return a stream that reads by ranges.

        The readers of Parquet ask for exactly the parts that they need, so nothing is read ahead. Other files are read
        in blocks.
        """
        exact = path.endswith(".parquet")
        options = {"cache_type": "none"} if exact else {"cache_type": "readahead", "block_size": STREAM_BLOCK_BYTES}
        try:
            return cast(BinaryIO, self._stream(self._client, path, mode="rb", **options))
        except Exception as error:
            raise _converted(error, path) from error

    def info(self, path: str) -> dict[str, Any]:
        """Return the size of a file, and its SHA-256 if the hub knows it, which it does for large files."""
        try:
            about = self._client.info(path)
        except Exception as error:
            raise _converted(error, path) from error
        lfs = about.get("lfs")
        return {"size": about["size"]} | ({"sha256": lfs["sha256"]} if lfs else {})

    def unstrip_protocol(self, path: str) -> str:
        return str(Address("hf", path))

    @cached_property
    def _client(self) -> Any:
        import huggingface_hub

        guard_client()
        return huggingface_hub.HfFileSystem()

    @cached_property
    def _stream(self) -> Any:
        """The client's class of open files, with repeated attempts and errors for users."""
        import huggingface_hub

        class Stream(huggingface_hub.HfFileSystemFile):
            def _fetch_range(self, start: int, end: int) -> bytes:
                expected_bytes = min(end, self.size) - start
                fetch = super()._fetch_range

                def read() -> bytes:
                    try:
                        content = bytes(fetch(start, end))
                        if len(content) != expected_bytes:
                            raise ConnectionError(f"{len(content)} bytes instead of {expected_bytes}")
                    except Exception as error:
                        converted = _converted(error, self.path)
                        if 400 <= status_of(error) < 500:  # the answer will not change
                            raise converted from error
                        raise StorageUnavailable(**converted.parts()) from error
                    return content

                try:
                    return with_retries(read, HUB_READS, SILENT)
                except StorageUnavailable as error:  # to readers of data, an OSError is damage of the file
                    raise UserError(**error.parts()) from error

        return Stream


def _converted(error: Exception, path: str) -> UserError:
    """Return the error for users. Messages of the client may contain signed addresses."""
    name, _, rest = path.removeprefix("datasets/").partition("@")
    found = to_user_error(error, name, rest.partition("/")[0], downloading=True, kind="dataset")
    if isinstance(found, UserError):
        return found
    return UserError(
        "E-HUB-062",
        f"{path} cannot be read from the hub",
        why=type(error).__name__,
        fix="run the same command again: finished units are kept",
    )
