"""A compile cache whose entries are authenticated.

An entry is machine code, and JAX runs any entry that it finds. A flipped byte was observed to crash the process, or to
remain unnoticed: with zstandard installed, JAX writes frames without a checksum. Each entry therefore has a keyed
signature of its name and its content. An entry with a wrong signature counts as missing, and is compiled and written
again.

The key is in the user's configuration folder, not in the cache folder. A cache folder may be a mounted volume, a CI
cache or an unpacked archive. If it contained the key, anyone who can write entries could also sign them (docs/adr,
record 11).
"""

from __future__ import annotations

import hmac
import os
import warnings
from hashlib import sha256
from pathlib import Path

from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from forerun.files import atomic_write
from forerun.run_folder.user_key import make_private, signature, user_key

MAGIC = b"forerun sealed 1\n"
SUFFIX = ".sealed"
KEY = "compile-cache.key"
_SIGNATURE_BYTES = 32


def key_file() -> Path:
    """Return the path of the key that signs compiled programs."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "forerun" / KEY


class SealedCache(CacheInterface):
    """Signed entries in one private folder. `refused` counts entries whose signature was wrong.

    Raises:
      OSError: the folder or the key cannot be used, or the key would be inside of the folder.
    """

    def __init__(self, folder: Path, key: Path | None = None) -> None:
        key = key or key_file()
        make_private(folder)
        if key.resolve().is_relative_to(folder.resolve()):
            raise OSError(f"its key {key} would be inside of it; set XDG_CONFIG_HOME to another folder")
        self._path = folder
        self._key = user_key(key)
        self.refused = 0

    def get(self, key: str) -> bytes | None:
        """Return the program that this user has stored as `key`, or None."""
        try:
            raw = self._file(key).read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + _SIGNATURE_BYTES
        found, content = raw[len(MAGIC) : start], raw[start:]
        if raw.startswith(MAGIC) and hmac.compare_digest(found, signature(self._key, key, content)):
            return content
        self.refused += 1
        return None

    def put(self, key: str, value: bytes) -> None:
        """Store a program. Warn if that fails: a run can continue without a cache."""
        try:
            atomic_write(self._file(key), MAGIC + signature(self._key, key, value) + value)
        except OSError as error:
            warnings.warn(f"the compile cache {self._path} cannot be written: {error}", stacklevel=2)

    def _file(self, key: str) -> Path:
        return self._path / f"{sha256(key.encode()).hexdigest()}{SUFFIX}"


def use_sealed(folder: Path) -> None:
    """Make JAX store its compiled programs in a `SealedCache` from now on.

    JAX has no public function to set a cache. The oldest and the newest supported version create theirs with
    `get_file_cache`.
    """
    current = compilation_cache._cache
    if isinstance(current, SealedCache) and current._path == folder:
        return
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = _opened


def _opened(path: str) -> tuple[SealedCache, str] | None:
    """Return the cache and its path for JAX. If the folder cannot be used, warn and return None: nothing is cached."""
    try:
        return SealedCache(Path(path)), path
    except OSError as error:
        warnings.warn(f"the compile cache {path} cannot be used: {error}", stacklevel=2)
        return None
