"""Checkpoints made to do harm: each is a folder, and a word that the refusal must contain.

`build(root, marker)` writes them all. A case whose file can run code when it is unpickled would create `marker`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Writer = Callable[[Path], None]
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Case:
    name: str
    folder: Path
    word: str

    @property
    def file_bytes(self) -> int:
        """All that lies in the folder; links and pipes count nothing."""
        return sum(path.lstat().st_size for path in self.folder.iterdir() if path.is_file() and not path.is_symlink())


def packed(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": offsets}


def tensors(data: bytes = bytes(8), **entries: Any) -> bytes:
    return packed(json.dumps(entries).encode(), data)


def text(header: str, data: bytes = bytes(8)) -> bytes:
    return packed(header.encode(), data)


class Bomb:
    """Unpickled, it creates the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def _zip(name: str, content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, content)
    return made.getvalue()


def _headers() -> dict[str, tuple[bytes, str]]:
    """Faults of the length and of the JSON."""
    good = json.dumps({"a": entry()}).encode()
    one = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    many = ",".join(f'"t{number}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for number in range(1_000_000))
    wide = "[0" + ",4000000000000000000" * 7 + "]"
    full = ",".join(f'"t{number}":{{"dtype":"U8","shape":{wide},"data_offsets":[0,0]}}' for number in range(50_000))
    return {
        "empty file": (b"", "too short"),
        "seven bytes": (bytes(7), "too short"),
        "eight zero bytes": (bytes(8), "not a JSON object"),
        "length of 2^63": (packed(good, bytes(8), 1 << 63), "header length"),
        "length of 2^64-1": (packed(good, bytes(8), (1 << 64) - 1), "header length"),
        "length just over the limit": (packed(good, bytes(8), 100_000_001), "header length"),
        "length beyond the file": (packed(good, bytes(8), len(good) + 9), "beyond the file"),
        "length shorter than the JSON": (packed(good, bytes(8), len(good) - 3), "JSON"),
        "truncated header": (packed(good)[:20], "truncated"),
        "length without a header": (packed(b""), "not a JSON object"),
        "not JSON": (text("not json at all"), "not a JSON object"),
        "not JSON behind the brace": (text("{not json"), "not valid JSON"),
        "JSON array": (text("[1, 2]"), "not a JSON object"),
        "JSON string": (text('"model"'), "not a JSON object"),
        "space before the brace": (text(" {" + one + "}"), "not a JSON object"),
        "text behind the object": (text("{" + one + "} {}"), "nothing more"),
        "trailing comma": (text("{" + one + ",}"), "a string"),
        "bomb of brackets": (text("{" + '"a":' + "[" * 100_000), "'{'"),
        "bomb of objects": (text('{"a":' * 100_000), "more than 50000 tensors"),
        "bomb in a shape": (text('{"a":{"dtype":"F32","shape":' + "[" * 100_000), "whole number"),
        "duplicate tensors": (text("{" + one + "," + one + "}"), "duplicate name"),
        "duplicate by an escape": (text("{" + one + "," + one.replace("a", "\\u0061", 1) + "}"), "duplicate name"),
        "duplicate dtype": (text("{" + one.replace("{", '{"dtype":"F32",') + "}"), "duplicate key 'dtype'"),
        "invalid UTF-8": (packed(b"{" + one.encode().replace(b"a", b"\xff\xfe", 1) + b"}", bytes(8)), "UTF-8"),
        "lone surrogate": (text("{" + one.replace('"a"', '"\\ud800"') + "}"), "UTF-8"),
        "name with NUL": (text("{" + one.replace('"a"', '"a\\u0000b"') + "}"), "printable ASCII"),
        "name with a terminal escape": (text("{" + one.replace('"a"', '"\\u001b[2Ja"') + "}"), "printable ASCII"),
        "name of a megabyte": (text("{" + one.replace("a", "a" * (1 << 20), 1) + "}"), "longer than"),
        "name in letters that look alike": (text("{" + one.replace("a", "\u0430", 1) + "}"), "printable ASCII"),
        "name with wide characters": (
            text("{" + one.replace("a", "\U0001f4a3" + "a" * 1000, 1) + "}"),
            "printable ASCII",
        ),
        "all the tensors allowed, then a fault": (text("{" + full + "}", bytes(1)), "1 trailing bytes"),
        "a million tensors": (text("{" + many + "}", b""), "more than 50000 tensors"),
        "huge metadata": (text('{"__metadata__":{"a":"' + "x" * (6 << 20) + '"}}', b""), "longer than"),
        "endless metadata keys": (
            text('{"__metadata__":{' + ",".join(f'"{number}":""' for number in range(20_000)) + "}}", b""),
            "more than 10000 keys",
        ),
        "deep metadata": (text('{"__metadata__":' + '{"a":' * 1000 + "1" + "}" * 1001, b""), "a string"),
        "metadata with a number": (text('{"__metadata__":{"a":1}}', b""), "a string"),
        "metadata twice": (text('{"__metadata__":{},"__metadata__":{}}', b""), "duplicate name"),
    }


def _tensors() -> dict[str, tuple[bytes, str]]:
    """Faults of dtypes, shapes and ranges."""
    eight = bytes(8)
    return {
        "negative offset": (tensors(a=entry(offsets=[-8, 0])), "whole number"),
        "offsets as booleans": (tensors(a=entry(offsets=[False, True])), "whole number"),
        "offsets as floats": (tensors(a=entry(offsets=[0.0, 8.0])), "whole number"),
        "offset in exponents": (text('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8e0]}}'), "whole number"),
        "offsets with a vertical tab": (
            text('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,\v8]}}'),
            "whole number",
        ),
        "three offsets": (tensors(a=entry(offsets=[0, 4, 8])), "more than 2 numbers"),
        "one offset": (tensors(a=entry(offsets=[8])), "begin and a later end"),
        "offsets reversed": (tensors(a=entry(offsets=[8, 0])), "begin and a later end"),
        "offset of thirty digits": (tensors(a=entry(offsets=[0, 10**30])), "whole number"),
        "offset NaN": (text('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,NaN]}}'), "whole number"),
        "offset Infinity": (text('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}'), "whole number"),
        "negative shape": (tensors(a=entry(shape=[-2])), "whole number"),
        "two negative dimensions": (tensors(a=entry(shape=[-1, -2])), "whole number"),
        "shape as booleans": (tensors(a=entry(shape=[True, 2])), "whole number"),
        "shape as floats": (tensors(a=entry(shape=[2.0])), "whole number"),
        "shape as text": (tensors(a=entry(shape="22")), "'['"),
        "shape null": (tensors(a=entry(shape=None)), "'['"),
        "shape of 2^62": (tensors(a=entry(shape=[1 << 62])), "needs 18446744073709551616 bytes"),
        "product that wraps to the size": (tensors(a=entry(shape=[(1 << 62) + 2])), "needs 18446744073709551624 bytes"),
        "product that wraps to zero": (tensors(b"", a=entry([1 << 32, 1 << 32], [0, 0])), "its range has 0"),
        "a thousand dimensions": (tensors(a=entry(shape=[1] * 1000)), "more than 8 numbers"),
        "unknown dtype": (tensors(a=entry(dtype="F33")), "unknown dtype 'F33'"),
        "object dtype": (tensors(a=entry(dtype="|O")), "unknown dtype '|O'"),
        "dtype as a number": (tensors(a=entry(dtype=7)), "a string"),
        "wrong dtype for the size": (tensors(a=entry(dtype="F64")), "needs 16 bytes, its range has 8"),
        "unknown key": (tensors(a={**entry(), "__reduce__": "os.system"}), "unknown key"),
        "no dtype": (text('{"a":{"shape":[2],"data_offsets":[0,8]}}'), "lacks"),
        "a tensor that is a list": (text('{"a":[0,8]}'), "'{'"),
        "overlap": (tensors(bytes(12), a=entry(), b=entry(offsets=[4, 12])), "overlaps"),
        "the same range twice": (tensors(eight, a=entry(), b=entry()), "overlaps"),
        "out of range": (tensors(eight, a=entry([4], [0, 16])), "out of range"),
        "far out of range": (tensors(eight, a=entry([2], [1 << 62, (1 << 62) + 8])), "out of range"),
        "hole": (tensors(bytes(20), a=entry(), b=entry(offsets=[12, 20])), "hole of 4 bytes"),
        "hole at the start": (tensors(bytes(12), a=entry(offsets=[4, 12])), "hole of 4 bytes"),
        "trailing bytes": (tensors(bytes(1000), a=entry()), "992 trailing bytes"),
        "truncated data": (tensors(bytes(7), a=entry()), "truncated"),
        "no data at all": (tensors(b"", a=entry()), "truncated"),
        "bytes without tensors": (tensors(bytes(1000)), "1000 trailing bytes"),
    }


def _disguises(marker: Path) -> dict[str, tuple[bytes, str]]:
    bomb = {protocol: pickle.dumps(Bomb(marker), protocol) for protocol in (0, 2, 4, 5)}
    return {
        "pickle, protocol 2": (bomb[2] + bytes(100), "it is a pickle"),
        "pickle, protocol 4": (bomb[4] + bytes(100), "it is a pickle"),
        "pickle, protocol 5": (bomb[5] + bytes(100), "it is a pickle"),
        "pickle, protocol 0": (bomb[0] + bytes(100), "header length"),
        "pickle behind a good length": (packed(bomb[4]), "not a JSON object"),
        "torch.save": (_zip("archive/data.pkl", bomb[2]), "zip archive"),
        "numpy archive": (_zip("a.npy", b"\x93NUMPY" + bomb[2]), "zip archive"),
        "GGUF": (b"GGUF" + (3).to_bytes(4, "little") + bytes(200), "GGUF"),
        "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(200), "HDF5"),
        "Git LFS pointer": (b"version https://example.invalid/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        "web page": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
    }


def _index(weight_map: Any, **files: bytes) -> Writer:
    def write(folder: Path) -> None:
        (folder / INDEX).write_text(
            weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        )
        for name, content in files.items():
            (folder / f"{name}.safetensors").write_bytes(content)

    return write


def _indexes(outside: Path) -> dict[str, tuple[Writer, str]]:
    one, two = tensors(a=entry()), tensors(b=entry())
    both = tensors(bytes(16), a=entry(), b=entry(offsets=[8, 16]))
    doubled = '{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}'
    thousands = ",".join(f'"{number}":"x.safetensors"' for number in range(200_001))
    return {
        "index that climbs": (_index({"a": "../x.safetensors"}, x=one), "plain file name"),
        "index that climbs backwards": (_index({"a": "..\\x.safetensors"}, x=one), "plain file name"),
        "index with an absolute path": (_index({"a": str(outside)}, x=one), "plain file name"),
        "index with a subfolder": (_index({"a": "sub/x.safetensors"}, x=one), "plain file name"),
        "index with a hidden file": (_index({"a": ".x.safetensors"}, x=one), "plain file name"),
        "index with a pickle": (_index({"a": "pytorch_model.bin"}, x=one), "not the name of a safetensors"),
        "index with NUL": (_index({"a": "x\0.safetensors"}, x=one), "not the name of a safetensors"),
        "index with a missing file": (_index({"a": "y.safetensors"}, x=one), "missing"),
        "index with another tensor": (_index({"b": "x.safetensors"}, x=one), "disagrees"),
        "index with the wrong file": (_index({"a": "y.safetensors", "b": "x.safetensors"}, x=one, y=two), "disagrees"),
        "index that leaves a tensor out": (_index({"a": "x.safetensors"}, x=both), "disagrees"),
        "tensor in two shards": (_index({"a": "x.safetensors", "b": "y.safetensors"}, x=one, y=both), "defined twice"),
        "index without weights": (_index({}, x=one), "weight_map"),
        "index that is a list": (_index("[]", x=one), "'{'"),
        "index that is nested": (_index('{"weight_map":' + "[" * 100_000, x=one), "'{'"),
        "index with a doubled tensor": (_index(doubled), "duplicate"),
        "index without end": (_index('{"weight_map":{' + thousands + "}}"), "more than 200000 tensors"),
        "index beside a single file": (_index({"a": "x.safetensors"}, x=one, model=one), "two sets"),
        "only pickle": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.") and None, "pickle"),
    }


def _places(outside: Path) -> dict[str, tuple[Writer, str]]:
    def linked(target: Path | str) -> Writer:
        return lambda folder: (folder / "model.safetensors").symlink_to(target)

    def looped(folder: Path) -> None:
        (folder / "model.safetensors").symlink_to(folder / "other.safetensors")
        (folder / "other.safetensors").symlink_to(folder / "model.safetensors")

    return {
        "link to a file outside": (linked(outside), "leads outside"),
        "link that climbs": (linked("../../outside.safetensors"), "leads outside"),
        "link to an endless device": (linked("/dev/zero"), "leads outside"),
        "link to nothing": (linked("gone.safetensors"), "missing"),
        "links in a loop": (looped, "cannot be opened"),
        "folder": (lambda folder: (folder / "model.safetensors").mkdir(), "is a folder"),
        "pipe": (lambda folder: os.mkfifo(folder / "model.safetensors"), "is a pipe"),
    }


def _sparse(folder: Path) -> None:
    """A hundred megabytes of nothing, which takes no disk."""
    with (folder / "model.safetensors").open("wb") as file:
        file.write(packed(b"{", b"", 99_000_000))
        file.truncate(200_000_000)


def build(root: Path, marker: Path) -> list[Case]:
    """Write every case into a folder of its own under `root`."""
    outside = root / "outside.safetensors"
    root.mkdir(parents=True, exist_ok=True)
    outside.write_bytes(tensors(a=entry()))
    contents = {**_headers(), **_tensors(), **_disguises(marker)}
    writers: dict[str, tuple[Writer, str]] = {**_indexes(outside), **_places(outside)}
    writers["a header of zeros, 99 MB"] = _sparse, "not valid JSON"
    cases = []
    for number, (name, (content, word)) in enumerate({**contents, **writers}.items()):
        folder = root / "cases" / f"{number:03d}"
        folder.mkdir(parents=True)
        if isinstance(content, bytes):
            (folder / "model.safetensors").write_bytes(content)
        else:
            content(folder)
        cases.append(Case(name, folder, word))
    return cases
