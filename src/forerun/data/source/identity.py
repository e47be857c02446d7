"""Digests that identify the contents of files. Digests of large local files are cached."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.data.source.files import File, unreadable
from forerun.errors import UserError
from forerun.files import atomic_write

MEMO_BYTES = 1 << 20
_RACY_SECONDS = 2.0
_BLOCK_BYTES = 1 << 20
_THREADS = 8


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/forerun`, by default `~/.cache/forerun`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forerun"


def identities(files: Sequence[File]) -> list[str]:
    """Return one digest per file: of its bytes, or from the checksum and size that its store reports."""
    memo = _DigestCache(cache_folder() / "files.json")
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, max(1, len(files)))) as threads:
        found = list(threads.map(lambda file: _identity(file, memo), files))
    memo.write()
    return found


def _identity(file: File, memo: _DigestCache) -> str:
    """Return the identity of a file, or one of the file and its companions together."""
    found = [_own_identity(one, memo) for one in (file, *file.companions)]
    return found[0] if len(found) == 1 else f"sha256:{hashlib.sha256(' '.join(found).encode()).hexdigest()}"


def _own_identity(file: File, memo: _DigestCache) -> str:
    try:
        if file.store is not None:
            return _reported_identity(file.store.info(file.path)) or f"sha256:{_sha256(file)}"
        before = os.stat(file.path)
        known = memo.known(file.path, before)
        if known:
            return f"sha256:{known}"
        digest = _sha256(file)
        memo.record(file.path, before, os.stat(file.path), digest)
        return f"sha256:{digest}"
    except UserError:
        raise
    except Exception as error:  # each driver raises its own errors
        raise unreadable(file.name, error) from error


def _reported_identity(info: dict[str, Any]) -> str | None:
    """Return an identity from the metadata of a store, or None.

    The hub reports the SHA-256 of large files, so their identity is that of a downloaded file. Google reports md5 or
    crc32c, S3 and https report an ETag. A weak ETag does not identify the bytes.
    """
    size = info.get("size")
    if sha256 := info.get("sha256"):
        return f"sha256:{sha256}"
    if md5 := info.get("md5Hash"):
        return f"md5:{base64.b64decode(md5).hex()}:{size}"
    if crc32c := info.get("crc32c"):
        return f"crc32c:{crc32c}:{size}:{info.get('generation', info.get('etag'))}"
    etag = info.get("ETag") or info.get("etag")
    if etag and not str(etag).startswith("W/") and size is not None:
        return f"etag:{str(etag).strip(chr(34))}:{size}"
    return None


def _sha256(file: File) -> str:
    hasher = hashlib.sha256()
    raw = File(file.path, file.kind, "", file.store)  # the stored bytes, without decompression
    with raw.open() as stream:
        while block := stream.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


class _DigestCache:
    """A cache of digests of large files, by path, size, times and inode, in one JSON file.

    A damaged cache counts as empty.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._held = self._read()
        self._new: dict[str, list[Any]] = {}

    def known(self, name: str, about: os.stat_result) -> str | None:
        """Return the digest of an unchanged file, or None."""
        held = self._held.get(os.path.realpath(name))
        return str(held[-1]) if held and held[:-1] == _key(about) else None

    def record(self, name: str, before: os.stat_result, after: os.stat_result, digest: str) -> None:
        """Record the digest of a large file, unless it changed while it was read.

        A file that changed within the last 2 seconds is not recorded: a later write could leave the same times.
        """
        young = time.time() - max(before.st_mtime, before.st_ctime) < _RACY_SECONDS
        if before.st_size >= MEMO_BYTES and not young and _key(before) == _key(after):
            self._new[os.path.realpath(name)] = [*_key(before), digest]

    def write(self) -> None:
        """Write the new digests atomically.

        Two runs at the same time may lose each other's new entries. These files are then hashed again.
        """
        if not self._new:
            return
        with suppress(OSError):  # a cache that cannot be written costs time, not the run
            self._file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._file, json.dumps(self._read() | self._new))

    def _read(self) -> dict[str, list[Any]]:
        try:
            held = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        entries = held.items() if isinstance(held, dict) else ()
        return {name: entry for name, entry in entries if isinstance(entry, list) and _is_digest(entry[-1:])}


def _key(about: os.stat_result) -> list[int]:
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino]


def _is_digest(last: list[Any]) -> bool:
    return bool(last) and isinstance(last[0], str) and len(last[0]) == 64
