"""A model or dataset repository on the hub: listing and downloading its files through the hub client.

The client has its own settings for cache, token, endpoint and offline mode (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import StorageError
from forerun.hub.client import guard_client
from forerun.hub.errors import RepositoryKind, to_user_error
from forerun.units import MIB, Bytes

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
