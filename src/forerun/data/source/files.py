"""Finding the files that `data.path` names: one file, a folder or a glob, here or at an address that fsspec opens."""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from forerun.config.protocols import require_data_address
from forerun.data.source.hub import dataset_files
from forerun.data.text import TEXT_SUFFIXES, local_path
from forerun.errors import UserError
from forerun.files import open_regular
from forerun.installation import install_command
from forerun.safe_text import HIDDEN, redact

KINDS = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
}
PACKED = (".gz", ".zst")
_DRIVERS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "http": "https", "https": "https"}  # extras of forerun
_CHUNK_BYTES = 1 << 11  # 64 MiB at the most when it is unpacked: a zstd block of 4 bytes can hold 128 KiB
_BUFFER_BYTES = 1 << 17


@dataclass(frozen=True)
class File:
    """One file and what its ending says it is; `packed` is "", ".gz" or ".zst"."""

    path: str  # may hold the query of a URL: for messages use `name`
    kind: str
    packed: str = ""
    store: Any = None  # an fsspec file system, or None for a local file

    @cached_property
    def name(self) -> str:
        """The path for messages and records."""
        return redact(self.path)

    def open(self) -> BinaryIO:
        """Its bytes, unpacked."""
        zstandard = library("zstandard", self.name) if self.packed == ".zst" else None
        try:
            raw = open_regular(self.path) if self.store is None else self.store.open(self.path, "rb")
        except UserError:
            raise
        except Exception as error:  # each driver has errors of its own
            raise unreadable(self.name, error) from error
        if self.packed == ".gz":
            return cast(BinaryIO, _Gzip(raw))
        if self.packed == ".zst":
            return cast(BinaryIO, io.BufferedReader(_Zstd(raw, zstandard), _BUFFER_BYTES))
        return cast(BinaryIO, raw)

    def size_bytes(self) -> int:
        """Its size where it lies, packed or not; -1 if the store does not tell."""
        try:
            size = os.stat(self.path).st_size if self.store is None else self.store.info(self.path).get("size")
        except Exception as error:  # each driver has errors of its own
            raise unreadable(self.name, error) from error
        return -1 if size is None else int(size)

    def seekable(self) -> bool:
        """It can be read from the middle; an https server without ranges gives it from the front only."""
        return self.store is None or self.store.info(self.path).get("partial", True) is not False

    @property
    def address(self) -> str:
        return self.path if self.store is None else str(self.store.unstrip_protocol(self.path))


class BadZstd(OSError):
    """As gzip.BadGzipFile, for the other packer."""


class _Gzip(gzip.GzipFile):
    """Closes what it unpacks."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


class _Zstd(io.RawIOBase):
    """Unpacks frame after frame; a frame without its end is an EOFError, which zstandard's own reader lets pass."""

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


def find(place: str) -> list[File]:
    """The files of `place`, sorted by path and all of one kind.

    A folder gives the files whose ending is known, at any depth; hidden files and folders are left out. A file or
    a glob gives exactly what it names, and an unknown ending is plain text.
    """
    if place.startswith("hf://"):
        from forerun.data.source.hub import dataset_files

        files = _files(_sorted(place, [path for path in dataset_files(place) if _is_data(path.name)], _NOTHING))
    else:
        files = _remote(place) if "://" in place else _local(place)
    kinds = Counter(file.kind for file in files)
    if len(kinds) > 1:
        raise UserError(
            f"data.path: {place} holds files of {len(kinds)} kinds",
            why=", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            + f": for example {', '.join(sorted(_one_of_each(files)))}",
            fix=_one_kind(place, [file for file in files if file.kind == kinds.most_common(1)[0][0]]),
        )
    for file in files:
        if file.packed and file.kind in ("parquet", "arrow"):
            raise UserError(
                f"{file.name}: a packed {file.kind} file cannot be read",
                why=f"{file.kind} is read in parts, and {file.packed} allows none",
                fix=f"{'gunzip' if file.packed == '.gz' else 'unzstd'} {file.name}",
            )
    return files


def library(module: str, name: str) -> Any:
    """An optional library, imported when the file `name` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{name} needs {module.split('.')[0]}",
            why=f"import {module}: {error}",
            fix=install_command("data"),
        ) from error


def unreadable(name: str, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return UserError(f"{name} cannot be read", why=why, fix="look at its permissions and at data.path")


def _local(place: str) -> list[File]:
    path = Path(place).expanduser()
    if glob.has_magic(place) and not path.exists():
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if not os.path.isdir(name)]
        return _files(_sorted(place, found, "no file matches it"))
    path = _existing(place)
    if path.is_dir():
        return _files(_sorted(place, _walked(path), _NOTHING))
    return _files([path])


def _existing(place: str) -> Path:
    """`place` as a path that is there; a name such as owner/name may have been meant for Hugging Face."""
    try:
        return local_path(place, key="data.path")
    except UserError as error:
        path = Path(place)
        owner, name = ("/", *path.parts)[-2:]
        is_file = path.suffix != "" and path.suffix.lower() in (*KINDS, *PACKED)
        if is_file or path.parent.exists() or not re.fullmatch(_OWNER, owner):
            raise
        fix = f"{error.fix}; a dataset on Hugging Face: data.path=hf://datasets/{owner}/{name}"
        raise UserError(error.what, why=error.why, fix=fix) from None


_OWNER = r"[A-Za-z0-9][\w.-]*"


def _walked(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if _is_data(name)]
    return found


def _remote(place: str) -> list[File]:
    scheme = place.split("://")[0]
    if place.endswith(f"?{HIDDEN}"):
        raise UserError(
            f"data.path: {place} lacks its query",
            why="the run removed it from its job.yaml, because a query may be a secret",
            fix="use the job file that the run was started with, or set data.path=URL",
        )
    require_data_address(place)
    if scheme == "hf":
        return _files(dataset_files(place))
    fsspec = library("fsspec.core", place)
    try:
        store, path = _store(fsspec, place)
    except ImportError as error:
        raise UserError(
            f"data.path: {scheme}:// needs a driver that is not installed",
            why=str(error),
            fix=install_command(_DRIVERS[scheme]) if scheme in _DRIVERS else "install the package it names",
        ) from error
    except ValueError as error:  # of the driver's settings
        raise unreadable(redact(place), error) from error
    try:
        names = _remote_names(place, scheme, store, path)
    except UserError:
        raise
    except Exception as error:  # each driver has errors of its own
        raise _remote_refusal(place, scheme, error) from error
    return _files(names, store)


def _remote_names(place: str, scheme: str, store: Any, path: str) -> list[str]:
    if scheme in ("http", "https"):
        if "*" in urlsplit(path).path:
            raise UserError(
                f"data.path: {place}: a web address is one file",
                why="a web server has no list of its files to match with",
                fix="name one file, or put the files into a bucket or a folder",
            )
        _remote_parts(place, store, path)
        return [path]
    if glob.has_magic(path):
        found = (info["name"] for info in store.glob(path, detail=True).values() if info["type"] == "file")
        plain = (name for name in found if "/." in path or "/." not in name)  # as with a glob of local files
        return _sorted(place, plain, "no file matches it")
    if not store.isdir(path):
        store.info(path)
        return [path]
    folder = path.rstrip("/") + "/"
    below = (name for name in store.find(path) if name.startswith(folder) and not name.endswith("/"))
    return _sorted(place, (name for name in below if _is_data(name.removeprefix(folder))), _NOTHING)


def _remote_parts(place: str, store: Any, path: str) -> None:
    """Refuse a web server that sends whole files only: a file is read from where it is asked for, and again."""
    if store.info(path).get("size", 2) < 2:
        return
    try:
        with store.open(path, "rb", cache_type="none") as file:
            file.seek(1)
            file.read(1)
    except ValueError as error:
        raise UserError(
            f"{place} cannot be read in parts",
            why="the server sends whole files only: it does not answer Range requests",
            fix=f"curl -O '{place}', then set data.path to the file",
        ) from error


def _remote_refusal(place: str, scheme: str, error: Exception) -> UserError:
    if scheme in ("http", "https") and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the driver says "not found" of everything that went wrong
    status = str(getattr(error, "code", None) or getattr(error, "status", None))
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, FileNotFoundError) or status == "404":
        return UserError(
            f"{place} cannot be read: nothing is there",
            why=f"the store answered: {text or 'not found'}",
            fix="check the address letter by letter, upper and lower case too",
        )
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or status in ("401", "403"):
        return UserError(
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
            f"data.path: no data in {place}", why=nothing, fix="put the data there, or set data.path to one file"
        )
    return paths


def at_address(address: str, kind: str, packed: str) -> File:
    """A file that was found before, by its `address`."""
    if "://" not in address:
        return File(address, kind, packed)
    store, path = _store(library("fsspec.core", address), address)
    return File(path, kind, packed, store)


def _store(fsspec: Any, address: str) -> tuple[Any, str]:
    """Return the file system of an address and the path in it. A listing may contain hostile names: see protocols."""
    require_data_address(address)
    if not address.startswith(("http://", "https://")):
        return cast(tuple[Any, str], fsspec.url_to_fs(address))
    # aiohttp reads ~/.netrc and the proxy variables on request only. What the user configured for fsspec comes first.
    configured: dict[str, Any] = {}
    for scheme in ("http", "https"):
        configured |= importlib.import_module("fsspec.config").conf.get(scheme, {}).get("client_kwargs", {})
    return cast(tuple[Any, str], fsspec.url_to_fs(address, client_kwargs={"trust_env": True, **configured}))


def _files(paths: Iterable[Path | str], store: Any = None) -> list[File]:
    files = []
    for path in paths:
        ending, packed = _endings(str(path))
        files.append(File(str(path), KINDS.get(ending, "text"), packed, store))
    return files


def _endings(name: str) -> tuple[str, str]:
    """`a.jsonl.gz` -> (`.jsonl`, `.gz`)."""
    path = PurePosixPath(urlsplit(name).path if name.startswith(("http://", "https://")) else name)
    packed = path.suffix.lower() if path.suffix.lower() in PACKED else ""
    return (PurePosixPath(path.stem) if packed else path).suffix.lower(), packed


def _is_data(relative: str) -> bool:
    hidden = any(part.startswith(".") for part in relative.split("/"))
    return not hidden and _endings(relative)[0] in KINDS


def _one_kind(place: str, files: Iterable[File]) -> str:
    """How to name these of all the files of `place`."""
    endings = {_endings(file.name)[0] for file in files}
    if len(endings) > 1 or endings == {""}:
        return "move the others elsewhere, or set data.path to a glob"
    root = re.split(r"[^/]*[*?\[]", place)[0].rstrip("/") or "."
    packed = "*" if any(file.packed for file in files) else ""
    return f"name one kind: data.path='{root}/**/*{endings.pop()}{packed}'"


def _one_of_each(files: Iterable[File]) -> list[str]:
    return list({file.kind: os.path.basename(file.name) for file in files}.values())
