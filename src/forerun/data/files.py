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
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from forerun.data.text import TEXT_SUFFIXES, local_path
from forerun.errors import UserError

KINDS = {
    **dict.fromkeys(TEXT_SUFFIXES, "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
}
PACKED = (".gz", ".zst")
_DRIVERS = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class File:
    """One file and what its ending says it is; `packed` is "", ".gz" or ".zst"."""

    name: str
    kind: str
    packed: str = ""
    store: Any = None  # an fsspec file system, or None for a local file

    def open(self) -> BinaryIO:
        """Its bytes, unpacked."""
        zstandard = library("zstandard", self.name) if self.packed == ".zst" else None
        try:
            raw = open(self.name, "rb") if self.store is None else self.store.open(self.name, "rb")  # noqa: SIM115
        except Exception as error:  # each driver has errors of its own
            raise unreadable(self.name, error) from error
        if self.packed == ".gz":
            return cast(BinaryIO, _Gzip(raw))
        if self.packed == ".zst":
            return cast(BinaryIO, io.BufferedReader(_Zstd(raw, zstandard), _CHUNK_BYTES))
        return cast(BinaryIO, raw)


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
        self._rest = self._ready = b""

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
            self._ready = frame.decompress(packed)
        except self._library.ZstdError as error:
            raise OSError(f"not a zstd frame: {error}") from error
        self._frame, self._rest = (None, frame.unused_data) if frame.eof else (frame, b"")

    def close(self) -> None:
        self._raw.close()
        super().close()


def find(place: str) -> list[File]:
    """The files of `place`, sorted by path and all of one kind.

    A folder gives the files whose ending is known, at any depth; hidden files and folders are left out. A file or
    a glob gives exactly what it names, and an unknown ending is plain text.
    """
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
            fix="pip install 'forerun[data]'",
        ) from error


def unreadable(name: str, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return UserError(f"{name} cannot be read", why=why, fix="look at its permissions and at data.path")


def _local(place: str) -> list[File]:
    path = Path(place).expanduser()
    if glob.has_magic(place) and not path.exists():
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
        return _files(_sorted(place, found, "no file matches it"))
    path = local_path(place, key="data.path")
    if path.is_file():
        return _files([path])
    return _files(_sorted(place, _walked(path), _NOTHING))


def _walked(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if _is_data(name)]
    return found


def _remote(place: str) -> list[File]:
    fsspec = library("fsspec.core", place)
    scheme = place.split("://")[0]
    try:
        store, path = fsspec.url_to_fs(place)
    except ImportError as error:
        raise UserError(
            f"data.path: {scheme}:// needs a driver that is not installed",
            why=str(error),
            fix=f"pip install {_DRIVERS.get(scheme, 'the package named above')}",
        ) from error
    except ValueError as error:
        raise UserError(
            f"data.path: {scheme}:// is not known", why=str(error), fix="gs://, s3://, https:// or a local path"
        ) from error
    if scheme in ("http", "https"):
        return _files([path], store)
    try:
        if glob.has_magic(path):
            return _files(_sorted(place, store.glob(path), "no file matches it"), store)
        if not store.isdir(path):
            store.info(path)
            return _files([path], store)
        found = [name for name in store.find(path) if _is_data(name.removeprefix(path).lstrip("/"))]
    except UserError:
        raise
    except Exception as error:  # each driver has errors of its own
        raise unreadable(place, error) from error
    return _files(_sorted(place, found, _NOTHING), store)


_NOTHING = "no file in it or below it ends in " + ", ".join(ending for ending in KINDS if ending)


def _sorted(place: str, found: Iterable[Any], nothing: str) -> list[Any]:
    paths = sorted(found, key=lambda path: path.as_posix() if isinstance(path, Path) else path)
    if not paths:
        raise UserError(
            f"data.path: no data in {place}", why=nothing, fix="put the data there, or set data.path to one file"
        )
    return paths


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
