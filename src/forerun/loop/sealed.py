"""The compile cache, private and sealed: what was not written by this user on this machine is never run.

A compiled program is machine code, and JAX loads whatever lies in its cache. A flipped byte there was seen to end the
process, or to go unnoticed (with zstandard installed, whose frames JAX writes without a checksum). Here every entry
carries a keyed digest of its name and its content; one that does not fit is as good as none, and is written anew.
"""

from __future__ import annotations

import hmac
import os
import secrets
import warnings
from hashlib import sha256
from pathlib import Path

from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from forerun.files import atomic_write

MAGIC = b"forerun sealed 1\n"
SUFFIX = ".sealed"
SECRET = "secret"
_DIGEST_BYTES = 32


class Sealed(CacheInterface):
    """Entries of one folder, each written whole or not at all; `refused` counts those that did not fit."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
        self._path = folder
        self._secret = _secret(folder / SECRET)
        self.refused = 0

    def get(self, key: str) -> bytes | None:
        try:
            raw = self._file(key).read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + _DIGEST_BYTES
        digest, content = raw[len(MAGIC) : start], raw[start:]
        if raw.startswith(MAGIC) and hmac.compare_digest(digest, self.digest(key, content)):
            return content
        self.refused += 1
        return None

    def put(self, key: str, value: bytes) -> None:
        """A cache that cannot be written is told once, and does not end the run."""
        try:
            atomic_write(self._file(key), MAGIC + self.digest(key, value) + value)
        except OSError as error:
            warnings.warn(f"the compile cache {self._path} cannot be written: {error}", stacklevel=2)

    def _file(self, key: str) -> Path:
        return self._path / f"{sha256(key.encode()).hexdigest()}{SUFFIX}"

    def digest(self, key: str, content: bytes) -> bytes:
        """Return a digest that only this user can compute, on this machine."""
        seal = hmac.new(self._secret, f"{key}\n".encode(), sha256)
        seal.update(content)
        return seal.digest()


def use_sealed(folder: Path) -> None:
    """JAX keeps its compiled programs in a `Sealed` cache from here on.

    JAX has no public way to bring a cache of one's own; both ends of the versions that we support make theirs by this
    one function.
    """
    current = compilation_cache._cache
    if isinstance(current, Sealed) and current._path == folder:
        return
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = _opened


def _opened(path: str) -> tuple[Sealed, str] | None:
    """None, and a warning, where nothing can be kept: the run compiles anew and goes on."""
    try:
        return Sealed(Path(path)), path
    except OSError as error:
        warnings.warn(f"the compile cache {path} cannot be used: {error}", stacklevel=2)
        return None


def _secret(file: Path) -> bytes:
    """Made once; two processes that begin at the same time end up with the same one."""
    try:
        known = file.read_bytes()
        if len(known) == _DIGEST_BYTES and not file.stat().st_mode & 0o077:
            return known
        file.unlink()
    except FileNotFoundError:
        pass
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(secrets.token_bytes(_DIGEST_BYTES))
    try:
        os.link(part, file)
    except FileExistsError:
        pass
    finally:
        part.unlink()
    return file.read_bytes()
