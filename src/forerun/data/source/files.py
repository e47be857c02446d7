"""Data files: finding those of `data.path` (a file, folder or glob, local or at an fsspec address) and opening them."""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from forerun.config.addresses import require_data_address
from forerun.data.source.hub import dataset
from forerun.data.source.kinds import IN_PARTS, KINDS, PACKED, companion, companions_of, data_name, data_names
from forerun.data.text import local_path
from forerun.errors import UserError
from forerun.files import open_regular
from forerun.hub.repository import RangeFiles
from forerun.installation import install_command
from forerun.redirects import aiohttp_client, refused_redirect
from forerun.safe_text import HIDDEN, redact
from forerun.storage.address import WEB_PROTOCOLS, Address

# ---- Streams of decompressed bytes, for gzip and zstd ----


_CHUNK_BYTES = 1 << 11  # at most 64 MiB after decompression: a zstd block of 4 bytes can hold 128 KiB
_BUFFER_BYTES = 1 << 17


def decompressed(raw: Any, packed: str, zstandard: Any = None) -> BinaryIO:
    """Return a stream of the decompressed bytes of `raw`. `packed` is "", ".gz" or ".zst"."""
    if packed == ".gz":
        return cast(BinaryIO, _Gzip(raw))
    if packed == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstd(raw, zstandard), _BUFFER_BYTES))
    return cast(BinaryIO, raw)


class BadZstd(OSError):
    """An error for bytes that are not valid zstd, like gzip.BadGzipFile for gzip."""


class _Gzip(gzip.GzipFile):
    """A gzip stream that also closes the underlying file."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Zstd(io.RawIOBase):
    """A stream of decompressed zstd frames.

    An incomplete last frame raises EOFError. The reader of zstandard does not report it.
    """

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw, self._library = raw, zstandard
        self._frame: Any = None
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._rest or self._raw.read(_CHUNK_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last zstd frame has no end")
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        frame = self._frame or self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            self._ready = memoryview(frame.decompress(packed))
        except self._library.ZstdError as error:
            raise BadZstd(f"not a zstd frame: {error}") from error
        self._frame, self._rest = (None, frame.unused_data) if frame.eof else (frame, b"")

    def close(self) -> None:
        self._raw.close()
        super().close()


_DRIVERS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "http": "https", "https": "https"}  # scheme to extra

Enough = Callable[[Sequence["File"]], bool]


@dataclass(frozen=True)
class File:
    """One file, and its kind by the ending of its name. `packed` is its compression: "", ".gz" or ".zst"."""

    path: str  # may contain the query of a URL; use `name` in messages
    kind: str
    packed: str = ""
    store: Any = None  # an fsspec file system, or None for a local file

    @cached_property
    def name(self) -> str:
        """The path without secrets, for messages and records."""
        return redact(self.path)

    def open(self) -> BinaryIO:
        """Return a stream of the decompressed bytes. Raise UserError if the file cannot be opened."""
        zstandard = library("zstandard", self.name) if self.packed == ".zst" else None
        try:
            raw = open_regular(self.path) if self.store is None else self.store.open(self.path, "rb")
        except UserError:
            raise
        except Exception as error:  # each driver raises its own errors
            raise unreadable(self.name, error) from error
        return decompressed(raw, self.packed, zstandard)

    def size_bytes(self) -> int:
        """Return the stored size in bytes, before decompression, or -1 if the store does not report it."""
        try:
            size = os.stat(self.path).st_size if self.store is None else self.store.info(self.path).get("size")
        except UserError:
            raise
        except Exception as error:  # each driver raises its own errors
            raise unreadable(self.name, error) from error
        return -1 if size is None else int(size)

    def seekable(self) -> bool:
        """Return whether reading can begin anywhere. An https server without Range requests sends complete files."""
        return self.store is None or self.store.info(self.path).get("partial", True) is not False

    def beside(self, ending: str) -> File | None:
        """Return the file that belongs to this one and has this ending, or None if it does not exist."""
        path = companion(self.path, ending)
        try:
            exists = os.path.exists(path) if self.store is None else self.store.exists(path)
        except Exception as error:  # each driver raises its own errors
            raise unreadable(redact(path), error) from error
        return File(path, self.kind, "", self.store) if exists else None

    @property
    def companions(self) -> list[File]:
        """The files that belong to this one and determine its documents, such as the index of a token file."""
        return [one for ending in companions_of(self.kind) if (one := self.beside(ending)) is not None]

    @property
    def address(self) -> str:
        """The path, including the protocol of a remote store."""
        return self.path if self.store is None else str(self.store.unstrip_protocol(self.path))


def find(place: str, enough: Enough | None = None) -> list[File]:
    """Return the files that `place` names, sorted by path and all of one kind.

    Args:
        place: A path, a glob, or an address such as `gs://...`. A folder gives all files below it with a known
            ending, except hidden ones. A file with an unknown ending is plain text if it is named directly.
        enough: Returns whether files at the start of the list suffice. The others are then not returned, and files of
            a dataset on the hub are not fetched. By default, all files are needed.

    Raises:
        UserError: There are no files, several kinds of files, or files that cannot be read.
    """
    address = Address.of(place)
    if address.protocol == "hf":
        stop = None if enough is None else lambda paths: enough(_files(paths))
        found = dataset(place, stop)
        paths = [path for path in found.remote or found.files if _is_data(os.path.basename(path))]
        files = _files(_sorted(place, paths, _NOTHING), RangeFiles() if found.remote else None)
    else:
        files = _remote(address) if address.is_remote else _local(place)
    kinds = Counter(file.kind for file in files)
    if len(kinds) > 1:
        raise UserError(
            "E-DATA-025",
            f"data.path: {place} holds files of {len(kinds)} kinds",
            why=", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            + f": for example {', '.join(sorted(_one_of_each(files)))}",
            fix=_one_kind(place, [file for file in files if file.kind == kinds.most_common(1)[0][0]]),
        )
    for file in files:
        if file.packed and file.kind in IN_PARTS:
            raise UserError(
                "E-DATA-026",
                f"{file.name}: a compressed {file.kind} file cannot be read",
                why=f"{file.kind} is read in parts, and {file.packed} can only be read from the start",
                fix=f"{'gunzip' if file.packed == '.gz' else 'unzstd'} {file.name}",
            )
    return files if enough is None else next((files[:n] for n in range(1, len(files)) if enough(files[:n])), files)


def library(module: str, name: str) -> Any:
    """Import and return an optional library that the file `name` needs. Raise UserError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            "E-DATA-027",
            f"{name} needs {module.split('.')[0]}",
            why=f"import {module}: {error}",
            fix=install_command("data"),
        ) from error


def unreadable(name: str, error: Exception) -> UserError:
    """Return the error for a file that the system or a driver cannot read."""
    why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return UserError("E-DATA-028", f"{name} cannot be read", why=why, fix="check its permissions and data.path")


def _local(place: str) -> list[File]:
    path = Path(place).expanduser()
    if glob.has_magic(place) and not path.exists():
        found = [name for name in glob.glob(str(path), recursive=True) if not os.path.isdir(name)]
        return _files(_sorted(place, map(Path, data_names(found, named=True)), "no file matches it"))
    path = _existing(place)
    if path.is_dir():
        return _files(_sorted(place, _data_files_below(path), _NOTHING))
    return _files([data_name(str(path))])


def _existing(place: str) -> Path:
    """Return `place` as an existing path, or raise UserError.

    If it looks like owner/name, the error also proposes the dataset of that name on Hugging Face.
    """
    try:
        return local_path(place, key="data.path")
    except UserError as error:
        path = Path(place)
        owner, name = ("/", *path.parts)[-2:]
        is_file = path.suffix != "" and path.suffix.lower() in (*KINDS, *PACKED)
        if is_file or path.parent.exists() or not re.fullmatch(_OWNER, owner):
            raise
        fix = f"{error.fix}; a dataset on Hugging Face: data.path=hf://datasets/{owner}/{name}"
        raise UserError(error.code, error.what, why=error.why, fix=fix) from None


_OWNER = r"[A-Za-z0-9][\w.-]*"


def _data_files_below(folder: Path) -> list[Path]:
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return [Path(name) for name in data_names(found) if _is_data(os.path.basename(name))]


def _remote(address: Address) -> list[File]:
    place, scheme = str(address), address.protocol or ""
    if place.endswith(f"?{HIDDEN}"):
        raise UserError(
            "E-DATA-029",
            f"data.path: {place} lacks its query",
            why="the run removed it from its job.yaml, because a query may be a secret",
            fix="use the job file that the run was started with, or set data.path=URL",
        )
    require_data_address(place)
    fsspec = library("fsspec.core", place)
    try:
        store, path = _store(fsspec, place)
    except ImportError as error:
        raise UserError(
            "E-DATA-030",
            f"data.path: {scheme}:// needs a driver that is not installed",
            why=str(error),
            fix=install_command(_DRIVERS[scheme]) if scheme in _DRIVERS else "install the package that it names",
        ) from error
    except ValueError as error:  # invalid settings of the driver
        raise unreadable(redact(place), error) from error
    try:
        names = _remote_names(place, scheme, store, path)
    except UserError:
        raise
    except Exception as error:  # each driver raises its own errors
        raise _remote_error(place, scheme, error) from error
    return _files(names, store)


def _remote_names(place: str, scheme: str, store: Any, path: str) -> list[str]:
    if scheme in WEB_PROTOCOLS:
        if "*" in urlsplit(path).path:
            raise UserError(
                "E-DATA-031",
                f"data.path: {place}: a web address is one file",
                why="a web server does not list its files",
                fix="name one file, or put the files into a bucket or a folder",
            )
        _require_ranges(place, store, path)
        return [path]
    if glob.has_magic(path):
        found = (info["name"] for info in store.glob(path, detail=True).values() if info["type"] == "file")
        # Skip hidden files, as a glob of local files does.
        plain = (name for name in found if "/." in path or "/." not in name)
        return _sorted(place, data_names(plain, named=True), "no file matches it")
    if not store.isdir(path):
        store.info(path)
        return [data_name(path)]
    folder = path.rstrip("/") + "/"
    below = (name for name in store.find(path) if name.startswith(folder) and not name.endswith("/"))
    return _sorted(place, (name for name in data_names(below) if _is_data(name.removeprefix(folder))), _NOTHING)


def _require_ranges(place: str, store: Any, path: str) -> None:
    """Raise UserError if a web server sends only complete files. Files are read in parts, some of them repeatedly."""
    if store.info(path).get("size", 2) < 2:
        return
    try:
        with store.open(path, "rb", cache_type="none") as file:
            file.seek(1)
            file.read(1)
    except ValueError as error:
        raise UserError(
            "E-DATA-032",
            f"{place} cannot be read in parts",
            why="the server sends only complete files: it does not support Range requests",
            fix=f"curl -O '{place}', then set data.path to the file",
        ) from error


def _remote_error(place: str, scheme: str, error: Exception) -> UserError:
    """Return the error for remote data that does not exist, must not be read, or cannot be read."""
    if (refusal := refused_redirect(error)) is not None:
        return refusal
    if scheme in WEB_PROTOCOLS and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the driver reports every failure as "not found"
    status = str(getattr(error, "code", None) or getattr(error, "status", None))
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, FileNotFoundError) or status == "404":
        return UserError(
            "E-DATA-033",
            f"{place} cannot be read: it does not exist",
            why=f"the store answered: {text or 'not found'}",
            fix="check the spelling of the address, including upper and lower case",
        )
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or status in ("401", "403"):
        return UserError(
            "E-DATA-034",
            f"data.path: you may not read {place}",
            why=f"{type(error).__name__}: {text}",
            fix=_LOG_IN.get(scheme, "ask for access, or log in"),
        )
    return unreadable(place, error)


_LOG_IN = {
    **dict.fromkeys(("gs", "gcs"), "gcloud auth application-default login, with an account that may read the bucket"),
    **dict.fromkeys(("http", "https"), "add a line to ~/.netrc: machine HOST login USER password PASSWORD"),
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, of an account that may read the bucket",
}
_NOTHING = "no file in it or below it ends in " + ", ".join(ending for ending in KINDS if ending)


def _sorted(place: str, found: Iterable[Any], nothing: str) -> list[Any]:
    paths = sorted(found, key=lambda path: path.as_posix() if isinstance(path, Path) else path)
    if not paths:
        raise UserError(
            "E-DATA-035",
            f"data.path: no data in {place}",
            why=nothing,
            fix="put the data there, or set data.path to one file",
        )
    return paths


def at_address(address: str, kind: str, packed: str) -> File:
    """Return the file of an `address` that was found before, without looking for it again."""
    if not Address.of(address).is_remote:
        return File(address, kind, packed)
    store, path = _store(library("fsspec.core", address), address)
    return File(path, kind, packed, store)


def _store(fsspec: Any, address: str) -> tuple[Any, str]:
    """Return the file system of an address and the path in it. A listing may contain hostile names: see protocols."""
    require_data_address(address)
    parsed = Address.of(address)
    if parsed.protocol == "hf":
        return RangeFiles(), parsed.rest
    if not parsed.is_web:
        return cast(tuple[Any, str], fsspec.url_to_fs(address))
    # aiohttp reads ~/.netrc and proxy variables only with trust_env. The user's fsspec settings take precedence.
    configured: dict[str, Any] = {}
    for scheme in WEB_PROTOCOLS:
        configured |= importlib.import_module("fsspec.config").conf.get(scheme, {}).get("client_kwargs", {})
    settings = {"client_kwargs": {"trust_env": True, **configured}, "get_client": aiohttp_client}
    return cast(tuple[Any, str], fsspec.url_to_fs(address, **settings))


def _files(paths: Iterable[Path | str], store: Any = None) -> list[File]:
    files = []
    for path in paths:
        ending, packed = _endings(str(path))
        files.append(File(str(path), KINDS.get(ending, "text"), packed, store))
    return files


def _endings(name: str) -> tuple[str, str]:
    """Return the ending and the compression of a name: `a.jsonl.gz` -> (`.jsonl`, `.gz`)."""
    path = PurePosixPath(urlsplit(name).path if Address.of(name).is_web else name)
    packed = path.suffix.lower() if path.suffix.lower() in PACKED else ""
    return (PurePosixPath(path.stem) if packed else path).suffix.lower(), packed


def _is_data(relative: str) -> bool:
    hidden = any(part.startswith(".") for part in relative.split("/"))
    return not hidden and _endings(relative)[0] in KINDS


def _one_kind(place: str, files: Iterable[File]) -> str:
    """Return the fix for a `place` with several kinds: how to select only `files`."""
    endings = {_endings(file.name)[0] for file in files}
    if len(endings) > 1 or endings == {""}:
        return "move the others elsewhere, or set data.path to a glob"
    root = re.split(r"[^/]*[*?\[]", place)[0].rstrip("/") or "."
    packed = "*" if any(file.packed for file in files) else ""
    return f"name one kind: data.path='{root}/**/*{endings.pop()}{packed}'"


def _one_of_each(files: Iterable[File]) -> list[str]:
    return list({file.kind: os.path.basename(file.name) for file in files}.values())
