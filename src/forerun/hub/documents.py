"""JSON files of a checkpoint: config.json and similar files, and the index of sharded weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from forerun.errors import UserError
from forerun.hub.files import open_regular, read_exactly, shown
from forerun.hub.json_scanner import FaultError, Scanner
from forerun.units import MIB, Bytes

INDEX_NAME = "model.safetensors.index.json"

MAX_CONFIG_BYTES = MIB
MAX_JSON_BYTES = 8 * MIB
MAX_INDEX_BYTES = 64 * MIB
MAX_DEPTH = 32
MAX_VALUES = 250_000
MAX_INDEX_TENSORS = 200_000
MAX_NAME_BYTES = 1024


def read_json(
    path: Path, *, limit_bytes: int = MAX_JSON_BYTES, roots: tuple[Path, ...] | None = None
) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Args:
        path: The file.
        limit_bytes: The largest allowed size of the file.
        roots: The folders that may contain the file after links are resolved. None means those of its checkpoint.

    Raises:
        UserError: The file is missing, too large or not valid. Limits on the number and depth of values apply too, and
            duplicate keys, NaN and Infinity are not allowed.
    """
    raw = _text(path, limit_bytes, roots)
    try:
        # Each value follows one of these characters. Count them before any object is built.
        if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise FaultError(f"it has more than {MAX_VALUES} values")
        tree = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
        if not isinstance(tree, dict):
            raise FaultError("it is not a JSON object: {...}")
        _check_depth(tree)
    except UnicodeDecodeError as error:
        raise _unsound(path, f"it is not UTF-8 text: byte {error.start} cannot be read") from None
    except json.JSONDecodeError as error:
        raise _unsound(path, f"it is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _unsound(path, "it is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise _unsound(path, "it has a number of too many digits") from None
    except FaultError as fault:
        raise _unsound(path, str(fault)) from None
    return tree


def read_index(folder: Path, roots: tuple[Path, ...] | None = None) -> dict[str, str] | None:
    """Return the file name of each tensor from the index of sharded weights, or None if the folder has no index.

    File names have no directory part, so they cannot lead outside the folder.
    """
    path = folder / INDEX_NAME
    if not os.path.lexists(path):
        return None
    raw = _text(path, MAX_INDEX_BYTES, roots)
    try:
        return _weight_map(Scanner(raw))
    except FaultError as fault:
        raise _unsound(path, str(fault)) from None


def _weight_map(scan: Scanner) -> dict[str, str]:
    """Return the weight map of an index `{"metadata": {...}, "weight_map": {tensor: file}}`. Keys have any order."""
    weight_map: dict[str, str] | None = None
    seen: set[str] = set()
    scan.expect(b"{", "the index")
    while scan.more(b"}", not seen, "the index"):
        key = scan.string("a key of the index", MAX_NAME_BYTES)
        scan.expect(b":", "the index")
        if key in seen:
            raise FaultError(f"duplicate key {shown(key)}")
        seen.add(key)
        if key == "weight_map":
            weight_map = _tensor_files(scan)
        elif key == "metadata":
            _skip_flat_object(scan)
        else:
            raise FaultError(f"unknown key {shown(key)}")
    scan.end("the index")
    if not weight_map:
        raise FaultError("it lacks a weight_map with tensors")
    return weight_map


def _tensor_files(scan: Scanner) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    names: dict[str, str] = {}
    scan.expect(b"{", "weight_map")
    while scan.more(b"}", not weight_map, "weight_map"):
        if len(weight_map) == MAX_INDEX_TENSORS:
            raise FaultError(f"weight_map has more than {MAX_INDEX_TENSORS} tensors")
        tensor = scan.string("a tensor's name", MAX_NAME_BYTES)
        if not (tensor.isascii() and tensor.isprintable()):
            raise FaultError(f"tensor {shown(tensor)}: its name has a character that is not printable ASCII")
        if tensor in weight_map:
            raise FaultError(f"duplicate tensor {shown(tensor)} in weight_map")
        scan.expect(b":", f"tensor {shown(tensor)}")
        file = scan.string(f"the file of tensor {shown(tensor)}", MAX_NAME_BYTES)
        if file not in names:
            names[file] = _plain(file)
        weight_map[tensor] = names[file]
    return weight_map


def _plain(file: str) -> str:
    if "/" in file or "\\" in file or file.startswith("."):
        raise FaultError(f"{shown(file)} is not a plain file name: a path could lead outside the folder")
    if not file.endswith(".safetensors") or not file.isprintable():
        raise FaultError(f"{shown(file)} is not the name of a safetensors file")
    return file


def _skip_flat_object(scan: Scanner) -> None:
    scan.expect(b"{", "metadata")
    first = True
    while scan.more(b"}", first, "metadata"):
        first = False
        scan.string("a key of metadata", MAX_NAME_BYTES)
        scan.expect(b":", "metadata")
        scan.skip_scalar("metadata", MIB)


def _text(path: Path, limit_bytes: int, roots: tuple[Path, ...] | None) -> bytes:
    descriptor = open_regular(path, roots)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise _unsound(path, f"it has {Bytes(size)}, more than the {Bytes(limit_bytes)} allowed")
        return read_exactly(descriptor, size, 0, path)
    finally:
        os.close(descriptor)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FaultError(f"duplicate key {shown(twice)}")
    return tree


def _no_constant(word: str) -> NoReturn:
    raise FaultError(f"{word} is not a JSON number")


def _check_depth(tree: Any) -> None:
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise FaultError(f"it is nested deeper than {MAX_DEPTH} levels")
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]


def _unsound(path: Path, why: str) -> UserError:
    return UserError("E-HUB-010", f"{path} cannot be used", why=why, fix="download the file again, or correct it")
