"""The weights of a checkpoint as views of memory-mapped files, without copies."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forerun.errors import UserError
from forerun.hub.documents import INDEX_NAME, read_index
from forerun.hub.files import open_regular, read_exactly, roots_of, shown
from forerun.hub.json_scanner import FaultError, Scanner
from forerun.units import MIB, Bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# ---- The header of a safetensors file. It is checked against the file before memory is allocated for tensors ----
#
# A file has 8 bytes with the little-endian length of the header, the header in JSON, and the data of the tensors. The
# ranges of the tensors must cover the data exactly, and the length of each must match its dtype and shape.


ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
_KNOWN = {name: name for name in ITEM_BYTES}

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 50_000
MAX_NAME_BYTES = 1024
MAX_DIMS = 8
MAX_METADATA_BYTES = 4 * MIB
MAX_METADATA_KEYS = 10_000
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The dtype and shape of a tensor, and its byte range. `begin` and `end` count from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def data_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int  # size of the file when the header was read


def header_of(descriptor: int, path: Path) -> Header:
    """Return the checked header of an open file. Raise a UserError that names the file if it is not valid."""
    file_bytes = os.fstat(descriptor).st_size
    try:
        raw = _header_text(descriptor, path, file_bytes)
        tensors, metadata = _parsed(raw, path, _LENGTH_BYTES + len(raw), file_bytes)
        _check_cover(tensors, _LENGTH_BYTES + len(raw), file_bytes)
    except FaultError as fault:
        raise UserError(
            "E-HUB-016",
            f"{path} is not a valid safetensors file",
            why=str(fault),
            fix=_fix(str(fault)),
        ) from None
    return Header(tensors, metadata, file_bytes)


def _header_text(descriptor: int, path: Path, file_bytes: int) -> bytes:
    start = read_exactly(descriptor, min(file_bytes, 64), 0, path)
    if file_bytes < _LENGTH_BYTES:
        raise FaultError(f"it has {file_bytes} bytes: too short, the header's length alone takes {_LENGTH_BYTES}")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    disguise = _disguise(start)
    if disguise and (length > file_bytes - _LENGTH_BYTES or start[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{"):
        raise FaultError(f"it is {disguise}")
    if length > MAX_HEADER_BYTES:
        raise FaultError(f"its header length is {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    if length > file_bytes - _LENGTH_BYTES:
        raise FaultError(f"its header length is {length} bytes, beyond the file's {file_bytes}: truncated or damaged")
    if start[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{" or length < 2:
        raise FaultError("its header is not a JSON object")
    return read_exactly(descriptor, length, _LENGTH_BYTES, path)


def _disguise(start: bytes) -> str | None:
    """Return the format of a file that is not safetensors despite its name, or None if it is not recognized."""
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":
        return "a pickle, which can run code when it is loaded"
    kinds = (
        (b"PK\x03\x04", "a zip archive, such as torch.save writes (pickle inside)"),
        (b"GGUF", "a GGUF file"),
        (b"\x89HDF", "an HDF5 file"),
        (b"\x1f\x8b", "a gzip file"),
        (b"version http", "a Git LFS pointer: the weights themselves were not downloaded"),
        (b"<!DOCTYPE", "a web page"),
        (b"<html", "a web page"),
    )
    return next((kind for magic, kind in kinds if start.startswith(magic)), None)


def _fix(fault: str) -> str:
    """Return the fix for a fault."""
    if "Git LFS" in fault:
        return "run `git lfs pull` in that folder"
    if "pickle" in fault or "GGUF" in fault or "HDF5" in fault:
        return "use a checkpoint with safetensors; no code from this file was run"
    return "download the file again; if the error remains, do not trust its source"


def _parsed(raw: bytes, path: Path, data: int, file_bytes: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    if raw.count(b"{") > MAX_TENSORS + 2:
        raise FaultError(f"it has more than {MAX_TENSORS} tensors")
    scan = Scanner(raw)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    scan.expect(b"{", "the header")
    first = True
    while scan.more(b"}", first, "the header"):
        first = False
        name = scan.string("a tensor's name", MAX_NAME_BYTES)
        scan.expect(b":", f"tensor {shown(name)}")
        if name in tensors or (name == _METADATA and metadata is not None):
            raise FaultError(f"duplicate name {shown(name)} in its header")
        if name == _METADATA:
            metadata = _metadata(scan)
        else:
            tensors[name] = _tensor(scan, name, path, data, file_bytes)
    scan.end("the header")
    return tensors, metadata or {}


def _metadata(scan: Scanner) -> dict[str, str]:
    metadata: dict[str, str] = {}
    begin = scan.at
    scan.expect(b"{", _METADATA)
    while scan.more(b"}", not metadata, _METADATA):
        key = scan.string(f"a key of {_METADATA}", MAX_NAME_BYTES)
        if key in metadata:
            raise FaultError(f"duplicate key {shown(key)} in {_METADATA}")
        scan.expect(b":", _METADATA)
        metadata[key] = scan.string(f"{_METADATA}[{shown(key)}]", MAX_METADATA_BYTES)
        if scan.at - begin > MAX_METADATA_BYTES:
            raise FaultError(f"{_METADATA} is longer than {Bytes(MAX_METADATA_BYTES)}")
        if len(metadata) > MAX_METADATA_KEYS:
            raise FaultError(f"{_METADATA} has more than {MAX_METADATA_KEYS} keys")
    return metadata


def _tensor(scan: Scanner, name: str, path: Path, data: int, file_bytes: int) -> TensorInfo:
    tensor = f"tensor {shown(name)}"
    if not (name.isascii() and name.isprintable()):
        raise FaultError(f"{tensor}: its name has a character that is not printable ASCII")
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    scan.expect(b"{", tensor)
    first = True
    while scan.more(b"}", first, tensor):
        first = False
        key = scan.string(f"a key of {tensor}", MAX_NAME_BYTES)
        scan.expect(b":", tensor)
        if key == "dtype" and dtype is None:
            dtype = scan.string(f"dtype of {tensor}", MAX_NAME_BYTES)
        elif key == "shape" and shape is None:
            shape = scan.whole_numbers(f"shape of {tensor}", MAX_DIMS)
        elif key == "data_offsets" and offsets is None:
            offsets = scan.whole_numbers(f"data_offsets of {tensor}", 2)
        elif key in ("dtype", "shape", "data_offsets"):
            raise FaultError(f"{tensor}: duplicate key {shown(key)}")
        else:
            raise FaultError(f"{tensor}: unknown key {shown(key)}")
    if dtype is None or shape is None or offsets is None:
        raise FaultError(f"{tensor} lacks dtype, shape or data_offsets")
    return _checked(tensor, path, dtype, shape, offsets, data, file_bytes)


def _checked(
    tensor: str, path: Path, dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...], data: int, file_bytes: int
) -> TensorInfo:
    known = _KNOWN.get(dtype)
    if known is None:
        raise FaultError(f"{tensor}: unknown dtype {shown(dtype)}; known are {', '.join(ITEM_BYTES)}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FaultError(f"{tensor}: data_offsets {list(offsets)} are not a begin and a later end")
    begin, end = offsets
    if data + end > file_bytes:
        raise FaultError(
            f"{tensor} is out of range: it ends at byte {data + end} of a file of {file_bytes}: truncated or damaged"
        )
    needed = math.prod(shape) * ITEM_BYTES[known]
    if needed != end - begin:
        raise FaultError(f"{tensor}: {known}{list(shape)} needs {needed} bytes, its range has {end - begin}")
    return TensorInfo(path, known, shape, data + begin, data + end)


def _check_cover(tensors: dict[str, TensorInfo], data: int, file_bytes: int) -> None:
    """Raise FaultError unless the ranges cover the data of the file without overlaps or gaps."""
    at, before = data, "the header"
    for name in sorted(tensors, key=lambda name: (tensors[name].begin, tensors[name].end)):
        info = tensors[name]
        if info.begin < at:
            raise FaultError(f"tensor {shown(name)} overlaps {before} by {at - info.begin} bytes")
        if info.begin > at:
            raise FaultError(f"a hole of {info.begin - at} bytes is before tensor {shown(name)}; no tensor uses it")
        at, before = info.end, f"tensor {shown(name)}"
    if at != file_bytes:
        raise FaultError(f"it has {file_bytes - at} trailing bytes that no tensor uses")


SINGLE_NAME = "model.safetensors"
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_COMPARED_BYTES = 1 << 24
_NUMPY_NAMES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BF16": "bfloat16", "BOOL": "bool"}
_NUMPY_KINDS = {"F": "float", "I": "int", "U": "uint"}


@dataclass
class _Mapped:
    """An open, memory-mapped file."""

    descriptor: int
    pages: mmap.mmap
    header: Header


class Weights(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint: a mapping from names to byte ranges, and `view` for the data.

    Use it as a context manager.
    """

    def __init__(self, folder: Path, roots: tuple[Path, ...], only: str | None = None) -> None:
        self.folder, self._only = folder, only
        self._files: dict[Path, _Mapped] = {}
        self._tensors: dict[str, TensorInfo] = {}
        try:
            self._open(roots)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files, merged."""
        return {key: value for file in self._files.values() for key, value in file.header.metadata.items()}

    @property
    def total_bytes(self) -> int:
        return sum(info.data_bytes for info in self._tensors.values())

    def view(self, name: str) -> NDArray[Any]:
        """Return the tensor as a read-only view of the mapped file.

        Raise a UserError if the size of the file has changed since it was opened. Reading pages beyond the end of a
        truncated file would kill the process (SIGBUS).
        """
        import numpy as np

        info = self._tensors[name]
        file = self._files[info.file]
        size = os.fstat(file.descriptor).st_size
        if size != file.header.file_bytes:
            raise UserError(
                "E-HUB-036",
                f"{info.file} changed while it was read",
                why=f"it had {file.header.file_bytes} bytes when it was opened and has {size} now",
                fix="make sure that no other process writes to the folder, then run the same command again",
            )
        dtype = numpy_dtype(info.dtype)
        if info.data_bytes == 0:
            empty = np.empty(info.shape, dtype)
            empty.flags.writeable = False
            return empty
        flat = np.frombuffer(file.pages, dtype, count=info.data_bytes // dtype.itemsize, offset=info.begin)
        return flat.reshape(info.shape)

    def release(self, name: str) -> None:
        """Let the kernel drop the tensor's pages from memory. A later view reads them again."""
        info = self._tensors[name]
        begin = info.begin - info.begin % mmap.PAGESIZE
        if info.data_bytes:
            self._files[info.file].pages.madvise(mmap.MADV_DONTNEED, begin, info.end - begin)

    def close(self) -> None:
        """Close the files. A view that is still in use keeps its mapping alive."""
        while self._files:
            _, file = self._files.popitem()
            with suppress(BufferError):
                file.pages.close()
            os.close(file.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, roots: tuple[Path, ...]) -> None:
        index = None if self._only else read_index(self.folder, roots)
        for file in [self._only] if self._only else _chosen(self.folder, index):
            header = self._map(self.folder / file, roots)
            for name, info in header.tensors.items():
                if name in self._tensors:
                    raise UserError(
                        "E-HUB-037",
                        f"tensor {shown(name)} is defined twice",
                        why=f"in {self._tensors[name].file.name} and in {file}, in {self.folder}",
                        fix="download the checkpoint again: its shards do not belong together",
                    )
                self._tensors[name] = info
        if index is not None:
            self._check_index(index)

    def _map(self, path: Path, roots: tuple[Path, ...]) -> Header:
        descriptor = open_regular(path, roots)
        try:
            header = header_of(descriptor, path)
            pages = mmap.mmap(descriptor, header.file_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._files[path] = _Mapped(descriptor, pages, header)
        return header

    def _check_index(self, index: dict[str, str]) -> None:
        wrong = [name for name, file in index.items() if name not in self._tensors or self._file(name) != file]
        if wrong:
            found = f"it is in {self._file(wrong[0])}" if wrong[0] in self._tensors else "no file has it"
            raise self._disagrees(f"tensor {shown(wrong[0])} is not in {index[wrong[0]]}: {found}", len(wrong))
        extra = [name for name in self._tensors if name not in index]
        if extra:
            raise self._disagrees(f"tensor {shown(extra[0])} of {self._file(extra[0])} is not in the index", len(extra))

    def _file(self, name: str) -> str:
        return self._tensors[name].file.name

    def _disagrees(self, why: str, count: int) -> UserError:
        others = f" ({count - 1} more like it)" if count > 1 else ""
        return UserError(
            "E-HUB-038",
            f"{self.folder / INDEX_NAME} disagrees with its files",
            why=why + others,
            fix="download the checkpoint again: index and shards do not belong together",
        )


class Selection(Weights):
    """Some of the tensors of other weights, which are closed together with it."""

    def __init__(self, weights: Weights, chosen: Callable[[str], bool]) -> None:
        self.folder, self._weights = weights.folder, weights
        self._tensors = {name: info for name, info in weights.items() if chosen(name)}

    def view(self, name: str) -> NDArray[Any]:
        return self._weights.view(name)

    def release(self, name: str) -> None:
        self._weights.release(name)

    def close(self) -> None:
        self._weights.close()


def open_weights(folder: Path, roots: tuple[Path, ...] | None = None, *, only: str | None = None) -> Weights:
    """Open the weights in `folder`: model.safetensors, or the shards that model.safetensors.index.json names.

    Args:
        folder: The folder of the checkpoint.
        roots: The folders that may contain the files after links are resolved. None means those of `folder`.
        only: The name of one file to open instead.

    Raises:
        UserError: The folder has no weights, or a file or the index is not valid.
    """
    return Weights(folder, roots_of(folder) if roots is None else roots, only)


def tensor_names(folder: Path) -> frozenset[str] | None:
    """Return the names of the tensors in `folder` from its index or its only file, or None if it has neither yet."""
    roots = roots_of(folder)
    index = read_index(folder, roots)
    if index is not None:
        return frozenset(index)
    if not (folder / SINGLE_NAME).exists():
        return None
    with open_weights(folder, roots) as weights:
        return frozenset(weights)


def weight_files(folder: Path, roots: tuple[Path, ...] | None = None) -> list[str]:
    """Return the names of the files that contain the weights, without opening them."""
    return _chosen(folder, read_index(folder, roots))


def _chosen(folder: Path, index: dict[str, str] | None) -> list[str]:
    single = os.path.lexists(folder / SINGLE_NAME)
    if index is None:
        if single:
            return [SINGLE_NAME]
        raise no_weights(str(folder), [entry.name for entry in folder.iterdir()] if folder.is_dir() else [])
    files = sorted(set(index.values()))
    if single and files != [SINGLE_NAME]:
        raise UserError(
            "E-HUB-039",
            f"{folder} has two sets of weights",
            why=f"it has {SINGLE_NAME}, and {INDEX_NAME} which names {len(files)} other files",
            fix=f"keep one of them: remove {SINGLE_NAME}, or {INDEX_NAME} and its shards",
        )
    return files


def no_weights(where: str, names: list[str]) -> UserError:
    """Return the error for a folder or repository without readable weights. `names` are its files."""
    pickles = sorted(name for name in names if name.endswith(PICKLE_ENDINGS))
    if pickles:
        return UserError(
            "E-HUB-040",
            f"{where} has its weights only as pickle, which can run code when it is loaded",
            why=f"found {', '.join(pickles[:3])}, and no {SINGLE_NAME} or {INDEX_NAME}",
            fix="use a revision or a model with safetensors; or, if you trust it, convert it with transformers:"
            '\nAutoModelForCausalLM.from_pretrained("...").save_pretrained("folder", safe_serialization=True)'
            "\nthen name that folder",
        )
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if "adapter_model.safetensors" in others:
        why = "adapter_model.safetensors is an adapter, not a complete model"
    elif others:
        why = f"found {', '.join(map(shown, others[:3]))}"
    else:
        why = f"it has neither {SINGLE_NAME} nor {INDEX_NAME}"
    return UserError(
        "E-HUB-041", f"{where} has no weights to read", why=why, fix="name a model with safetensors in its top folder"
    )


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype of a safetensors dtype. bfloat16 and the float8 kinds come from ml_dtypes."""
    import numpy as np

    name = _NUMPY_NAMES.get(dtype) or _NUMPY_KINDS[dtype[0]] + dtype[1:]
    if dtype == "BF16" or dtype.startswith("F8"):
        import ml_dtypes

        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extended
    return np.dtype(name).newbyteorder("<")


def equal_bytes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two views of one size have the same bytes. They are compared in pieces, to use little memory."""
    import numpy as np

    a, b = (view.reshape(-1).view(np.uint8) for view in (one, other))
    pieces = (slice(start, start + _COMPARED_BYTES) for start in range(0, a.size, _COMPARED_BYTES))
    return all(np.array_equal(a[piece], b[piece]) for piece in pieces)
