"""The header of a safetensors file. It is checked against the file before memory is allocated for tensors.

A file has 8 bytes with the little-endian length of the header, the header in JSON, and the data of the tensors. The
ranges of the tensors must cover the data exactly, and the length of each must match its dtype and shape.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UserError
from forerun.hub.files import read_exactly, shown
from forerun.hub.json_scanner import FaultError, Scanner
from forerun.units import MIB, Bytes

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
