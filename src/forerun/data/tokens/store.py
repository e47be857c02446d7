"""The tokenized documents on disk: immutable, checksummed, read at any place.

A store is a folder of units and an index. Opening it reads the index only; a unit's files are opened when first read.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Mask, Tokens
from forerun.data.ondisk import OnDisk
from forerun.data.source.rows import Bad
from forerun.data.tokens.recipe import FORMAT
from forerun.data.tokens.unit import SUMMARY, skipped_of, summary_of, token_type, unit_name
from forerun.errors import UserError

INDEX = "index.json"
OPEN_UNITS = 128  # each holds up to three files open


class Counts(NamedTuple):
    """Of one side of a store, or of both."""

    documents: int
    tokens: int
    learned: int


class _Unit(NamedTuple):
    tokens: OnDisk
    offsets: OnDisk
    learned: OnDisk | None


@dataclass(frozen=True, eq=False)
class StoredDocuments:
    """One side of a store, as `forerun.data.documents.Documents`."""

    folder: Path
    side: str
    vocab: int
    units: list[dict[str, Any]] = field(repr=False)  # of the index, in order

    def __len__(self) -> int:
        return int(self._first_document[-1])

    @property
    def tokens(self) -> int:
        return int(self._first_token[-1])

    @property
    def learned(self) -> int:
        """How many tokens are learned."""
        return sum(unit["sides"][self.side]["learned"] for unit in self.units)

    @property
    def masked(self) -> bool:
        return self.learned < self.tokens

    @property
    def largest(self) -> int:
        return max((unit["sides"][self.side]["largest"] for unit in self.units), default=0)

    @cached_property
    def digest(self) -> str:
        whole = "".join(unit["sides"][self.side]["digest"] for unit in self.units)
        return hashlib.sha256(whole.encode()).hexdigest()[:12]

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        wanted = np.asarray(documents, np.int64)
        flat = wanted.ravel()
        if flat.size and (flat.min() < 0 or flat.max() > len(self)):
            raise IndexError(f"document {flat.max()} of {len(self)}")
        found = np.full(flat.shape, self.tokens, np.int64)
        inside = flat < len(self)
        numbers = np.searchsorted(self._first_document, flat, side="right") - 1
        for number in np.unique(numbers[inside]).tolist():
            here = (numbers == number) & inside
            local = self._unit(number).offsets.at(flat[here] - self._first_document[number])
            found[here] = self._first_token[number] + local
        return found.reshape(wanted.shape)

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        wanted = np.asarray(addresses, np.int64)
        flat = wanted.ravel()
        if flat.size and (flat.min() < 0 or flat.max() >= self.tokens):
            raise IndexError(f"token {flat.max()} of {self.tokens}")
        found = np.zeros(flat.shape, np.int64)
        numbers = np.searchsorted(self._first_token, flat, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = numbers == number
            local = self._unit(number).offsets.places_of(flat[here] - self._first_token[number])
            found[here] = self._first_document[number] + local - 1
        return found.reshape(wanted.shape)

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        parts = list(self._parts(start, stop))
        if len(parts) == 1:
            return parts[0]
        if all(mask is None for _, mask in parts):
            return np.concatenate([ids for ids, _ in parts] or [np.zeros(0, self._type)]), None
        masks = [np.ones(len(ids), np.bool_) if mask is None else mask for ids, mask in parts]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate(masks)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Tokens, Mask | None]]:
        number = int(np.searchsorted(self._first_token, start, side="right")) - 1
        while start < stop:
            first, behind = int(self._first_token[number]), int(self._first_token[number + 1])
            end = min(stop, behind)
            if end > start:
                unit = self._unit(number)
                yield unit.tokens.read(start - first, end - first), _bits(unit.learned, start - first, end - first)
            start, number = max(start, end), number + 1

    @property
    def _type(self) -> type[Any]:
        """As on disk, but never unsigned with 32 bits, which nobody else speaks."""
        return np.uint16 if token_type(self.vocab) is np.uint16 else np.int32

    @cached_property
    def _first_document(self) -> NDArray[np.int64]:
        return self._firsts("documents")

    @cached_property
    def _first_token(self) -> NDArray[np.int64]:
        return self._firsts("tokens")

    def _firsts(self, what: str) -> NDArray[np.int64]:
        return np.cumsum([0, *(unit["sides"][self.side][what] for unit in self.units)], dtype=np.int64)

    @cached_property
    def _opened(self) -> OrderedDict[int, _Unit]:
        return OrderedDict()

    @cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def _unit(self, number: int) -> _Unit:
        with self._lock:
            found = self._opened.pop(number, None) or self._open(self.units[number])
            self._opened[number] = found  # as the one used last
            if len(self._opened) > OPEN_UNITS:
                self._opened.popitem(last=False)
        return found

    def _open(self, unit: dict[str, Any]) -> _Unit:
        about = unit["sides"][self.side]
        name = f"{unit_name(unit['unit'], unit['of'])}/{self.side}"
        tokens = _array(self.folder, f"{name}.tokens", self._type, about["tokens"])
        offsets = _array(self.folder, f"{name}.offsets", np.int64, about["documents"] + 1)
        bits = None
        if about["learned"] < about["tokens"]:
            bits = _array(self.folder, f"{name}.learned", np.uint8, -(-about["tokens"] // 8))
        return _Unit(tokens, offsets, bits)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_lock")}


@dataclass(frozen=True)
class Store:
    folder: Path
    train: StoredDocuments
    validation: StoredDocuments | None  # None: no document is kept for it
    rows: int  # bad ones included
    bad: int

    @property
    def counts(self) -> Counts:
        sides = [self.train] if self.validation is None else [self.train, self.validation]
        return Counts(*(sum(column) for column in zip(*((len(s), s.tokens, s.learned) for s in sides), strict=True)))

    @property
    def skipped(self) -> Iterator[Bad]:
        """Rows and files that were passed over, in order of the data."""
        from forerun.data.tokens.policy import bad_from

        names = [unit_name(unit["unit"], unit["of"]) for unit in self.train.units]
        return (bad_from(one) for one in skipped_of(self.folder, names))


def open_store(folder: Path, *, verify: bool = False) -> Store:
    """The store in `folder`; `verify` reads all of it and compares the checksums first."""
    index = read_index(folder)
    if verify:
        check(folder)
    units = index["units"]
    train, kept = (StoredDocuments(folder, side, index["recipe"]["vocab"], units) for side in ("train", "validation"))
    rows, bad = (sum(unit[name] for unit in units) for name in ("rows", "bad"))
    return Store(folder, train, kept if len(kept) else None, rows, bad)


def read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a finished store",
            why=f"it has no {INDEX}",
            fix="build what is missing: the same command again, or the shards that have not run",
        ) from None
    except ValueError as error:
        raise _damaged(folder / INDEX, f"it is not JSON: {error}") from None
    if index.get("format") != FORMAT:
        raise _damaged(folder / INDEX, f"its format is {index.get('format')}, and {FORMAT} is read here")
    return index


def check(folder: Path) -> None:
    """Reads everything, and raises for the first file that is not as it was written."""
    for unit in read_index(folder)["units"]:
        name = unit_name(unit["unit"], unit["of"])
        summary = summary_of(folder, name)
        if summary is None:
            raise _damaged(folder / name, "a file is missing or has another size")
        if any(summary[key] != value for key, value in unit.items()):
            raise _damaged(folder / name / SUMMARY, "it is not what the index says")
        for file, about in summary["files"].items():
            with (folder / name / file).open("rb") as content:
                found = hashlib.file_digest(content, "sha256").hexdigest()
            if found != about["sha256"]:
                raise _damaged(folder / name / file, f"its checksum is {found[:12]}, and was {about['sha256'][:12]}")


def _array(folder: Path, name: str, dtype: type[Any], count: int) -> OnDisk:
    path = folder / name
    wanted = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size != wanted:
            raise _damaged(path, f"it has {size} bytes, and was written with {wanted}")
        return OnDisk(path, np.dtype(dtype).newbyteorder("<"))
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None


def _bits(packed: OnDisk | None, start: int, stop: int) -> Mask | None:
    if packed is None:
        return None
    first = start // 8
    bits = np.unpackbits(packed.read(first, -(-stop // 8)), bitorder="little")
    return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged",
        why=why,
        fix=f"remove its folder and start again: what is whole is kept (rm -r {path.parent})",
    )
