"""The store of tokenized documents on disk: immutable, with checksums and random access.

A store is a folder of units and an index. Opening it reads only the index. The files of a unit are opened when they
are first read.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data import checked_json
from forerun.data.blocks import SUFFIX, BlockSums, damage
from forerun.data.disk_array import DiskArray
from forerun.data.documents import Mask, Tokens
from forerun.data.source.identity import cache_folder
from forerun.data.source.rows import BadRow
from forerun.data.storage.folder import StoreFolder, folder_at
from forerun.data.tokens.recipe import FORMAT
from forerun.data.tokens.unit import SKIPPED, SUMMARY, read_skipped, summary_of, token_type, unit_name
from forerun.errors import UserError
from forerun.files import atomic_write

INDEX = "index.json"
CHUNK_BYTES = 1 << 22  # read at a time when a complete file is compared with its checksum
OPEN_UNITS = 128  # each has up to three open files


class TokenCounts(NamedTuple):
    """Counts of one side of a store, or of both."""

    documents: int
    tokens: int
    learned: int  # tokens with a loss


class _Unit(NamedTuple):
    """The open files of one side of a unit. `learned` is None if all tokens have a loss."""

    tokens: DiskArray
    offsets: DiskArray
    learned: DiskArray | None


@dataclass(frozen=True, eq=False)
class StoredDocuments:
    """One side of a store. It implements `forerun.data.documents.Documents`."""

    folder: StoreFolder
    side: str
    vocab: int
    units: list[dict[str, Any]] = field(repr=False)  # entries of the index, in order

    def __len__(self) -> int:
        return int(self._first_document[-1])

    @property
    def tokens(self) -> int:
        return int(self._first_token[-1])

    @property
    def learned(self) -> int:
        """The number of tokens with a loss."""
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
        if not 0 <= start <= stop <= self._token_starts[-1]:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        number = bisect_right(self._token_starts, start) - 1
        if start < stop <= self._token_starts[number + 1]:  # fast path: almost every row is in one unit
            return self._within(number, start, stop)
        parts = list(self._parts(start, stop))
        if len(parts) == 1:
            return parts[0]
        if all(mask is None for _, mask in parts):
            return np.concatenate([ids for ids, _ in parts] or [np.zeros(0, self._type)]), None
        masks = [np.ones(len(ids), np.bool_) if mask is None else mask for ids, mask in parts]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate(masks)

    def _within(self, number: int, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        first, unit = self._token_starts[number], self._unit(number)
        bits = None if unit.learned is None else _bits(unit.learned, start - first, stop - first)
        return unit.tokens.read(start - first, stop - first), bits

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Tokens, Mask | None]]:
        number = bisect_right(self._token_starts, start) - 1
        while start < stop:
            end = min(stop, self._token_starts[number + 1])
            if end > start:
                yield self._within(number, start, end)
            start, number = max(start, end), number + 1

    @property
    def token_bytes(self) -> int:
        """Bytes of a token id in the files."""
        return np.dtype(token_type(self.vocab)).itemsize

    @property
    def _type(self) -> type[Any]:
        """The type of token ids in memory: uint16, or int32 for the uint32 of the files.

        Ids are below 2^31, and users of `Documents` expect one of these two types.
        """
        return np.uint16 if token_type(self.vocab) is np.uint16 else np.int32

    @cached_property
    def _first_document(self) -> NDArray[np.int64]:
        return self._firsts("documents")

    @cached_property
    def _first_token(self) -> NDArray[np.int64]:
        return self._firsts("tokens")

    @cached_property
    def _token_starts(self) -> list[int]:
        return self._first_token.tolist()  # faster than the array for single numbers

    def _firsts(self, what: str) -> NDArray[np.int64]:
        return np.cumsum([0, *(unit["sides"][self.side][what] for unit in self.units)], dtype=np.int64)

    @cached_property
    def _opened(self) -> OrderedDict[int, _Unit]:
        return OrderedDict()

    @cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def _unit(self, number: int) -> _Unit:
        """Return the open files of a unit. The OPEN_UNITS units that were used last stay open."""
        with self._lock:
            found = self._opened.pop(number, None) or self._open(self.units[number])
            self._opened[number] = found  # moves it to the end: used last
            if len(self._opened) > OPEN_UNITS:
                self._opened.popitem(last=False)
        return found

    def _open(self, unit: dict[str, Any]) -> _Unit:
        about = unit["sides"][self.side]
        name = f"{unit_name(unit['unit'], unit['of'])}/{self.side}"
        roots = unit.get("blocks", {})

        def array(what: str, dtype: type[Any], count: int) -> DiskArray:
            return _array(Path(self.folder.address) / f"{name}.{what}", dtype, count, roots.get(f"{self.side}.{what}"))

        tokens = array("tokens", self._type, about["tokens"])
        offsets = array("offsets", np.int64, about["documents"] + 1)
        bits = None
        if about["learned"] < about["tokens"]:
            bits = array("learned", np.uint8, -(-about["tokens"] // 8))
        return _Unit(tokens, offsets, bits)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without open files and the lock."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_lock")}


@dataclass(frozen=True)
class TokenStore:
    """An open store with its two sides."""

    folder: StoreFolder
    train: StoredDocuments
    validation: StoredDocuments | None  # None: no document is held out
    rows: int  # including bad ones
    bad: int
    checked: bool  # False: an earlier version of forerun wrote some units without checksums of blocks

    @property
    def counts(self) -> TokenCounts:
        sides = [self.train] if self.validation is None else [self.train, self.validation]
        return TokenCounts(
            *(sum(column) for column in zip(*((len(s), s.tokens, s.learned) for s in sides), strict=True))
        )

    @property
    def skipped(self) -> Iterator[BadRow]:
        """The skipped rows and files, in the order of the data."""
        from forerun.data.tokens.policy import bad_from

        names = [unit_name(unit["unit"], unit["of"]) for unit in self.train.units]
        return (bad_from(one) for one in read_skipped(Path(self.folder.address), names))

    @property
    def local_folder(self) -> Path:
        """The folder of this machine for files that belong to the store, such as packing plans.

        It is the folder of the store itself, or a folder of the cache for a store in a bucket.
        """
        if self.folder.is_local:
            return Path(self.folder.address)
        return cache_folder() / "stores" / self.folder.address.rpartition("/")[2]


def open_store(folder: Path | StoreFolder, *, verify: bool = False) -> TokenStore:
    """Open the store in `folder`. With `verify`, first compare all files with their checksums.

    Raise UserError if the store is not finished or is damaged.
    """
    folder = folder_at(folder)
    if verify:
        check(folder)
    index, checked = _index(folder)
    units = index["units"]
    train, kept = (StoredDocuments(folder, side, index["recipe"]["vocab"], units) for side in ("train", "validation"))
    rows, bad = (sum(unit[name] for unit in units) for name in ("rows", "bad"))
    return TokenStore(folder, train, kept if len(kept) else None, rows, bad, checked)


def read_index(folder: Path | StoreFolder) -> dict[str, Any]:
    """Return the index of a finished store."""
    return _index(folder_at(folder))[0]


def index_entry(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a unit's summary that the index holds."""
    keys = ("unit", "of", "rows", "bad", "bad_files", "sides", "blocks")
    return {key: summary[key] for key in keys if key in summary}


def _index(folder: StoreFolder) -> tuple[dict[str, Any], bool]:
    """Return the index, and whether it and every unit have checksums of their blocks."""
    path = Path(folder.address) / INDEX
    try:
        index, checked = checked_json.decode(folder.read(INDEX))
    except FileNotFoundError:
        raise UserError(
            "E-DATA-104",
            f"{folder.address} is not a finished store",
            why=f"it has no {INDEX}",
            fix="run the same command again, or run the missing shards",
        ) from None
    except ValueError as error:
        raise _damaged_index(path, str(error)) from None
    if index.get("format") != FORMAT:
        raise _damaged_index(path, f"its format is {index.get('format')}, and this version reads {FORMAT}")
    return index, checked and all("blocks" in unit for unit in index["units"])


def check(store: Path | StoreFolder, *, upgrade: bool = False) -> bool:
    """Read all files, and raise UserError for the first one that differs from its checksum.

    With `upgrade`, add checksums of blocks to units that an earlier version of forerun wrote without them. The digests
    of the documents do not change. Return whether any checksums were added.
    """
    index, checked = _index(folder_at(store))
    folder = Path(folder_at(store).address)
    units = [_checked_unit(folder, unit, upgrade=upgrade) for unit in index["units"]]
    if checked or not upgrade:
        return False
    # Write the index last: an interrupted upgrade then leaves a store without block checksums, which works as before.
    atomic_write(folder / INDEX, checked_json.encode(index | {"units": units}))
    return True


def _checked_unit(folder: Path, unit: dict[str, Any], *, upgrade: bool) -> dict[str, Any]:
    """Compare all files of a unit with their checksums, and return its entry for the index.

    With `upgrade`, add checksums of blocks to the unit and to the entry.
    """
    home = folder / unit_name(unit["unit"], unit["of"])
    summary = summary_of(folder, home.name)
    if summary is None:
        raise damage(
            home / SUMMARY, "it differs from its checksum, or a file of the unit is missing or has another size"
        )
    if any(summary.get(key) != value for key, value in unit.items()):
        raise damage(home / SUMMARY, f"it differs from {INDEX}")
    found = {name: _compared(home / name, about["sha256"]) for name, about in summary["files"].items()}
    if upgrade and "blocks" not in summary:
        sums = {name: content for name, content in found.items() if name != SKIPPED}
        summary["blocks"] = {name: root for name, (_, root) in sums.items()}
        for name, (content, _) in sums.items():
            atomic_write(home / (name + SUFFIX), content)
            about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            summary["files"][name + SUFFIX] = about
        atomic_write(home / SUMMARY, checked_json.encode(summary, indent=1))
    for name, root in summary.get("blocks", {}).items():
        if found[name][1] != root:
            raise damage(home / name, "the checksums of its blocks differ")
    return index_entry(summary)


def _compared(path: Path, sha256: str) -> tuple[bytes, str]:
    """Compare a file with its checksum, and return the checksums of its blocks and their root."""
    digest, blocks = hashlib.sha256(), BlockSums()
    with path.open("rb") as content:
        while data := content.read(CHUNK_BYTES):
            digest.update(data)
            blocks.update(data)
    if digest.hexdigest() != sha256:
        raise damage(path, f"its checksum is {digest.hexdigest()[:12]}, but {sha256[:12]} is recorded")
    return blocks.finish()


def _array(path: Path, dtype: type[Any], count: int, root: str | None) -> DiskArray:
    wanted = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size != wanted:
            raise damage(path, f"it has {size} bytes, but {wanted} were written")
        return DiskArray(path, np.dtype(dtype).newbyteorder("<"), root)
    except FileNotFoundError:
        raise damage(path, "it is missing") from None


def _bits(packed: DiskArray, start: int, stop: int) -> Mask:
    first = start // 8
    bits = np.unpackbits(packed.read(first, -(-stop // 8)), bitorder="little")
    return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)


def _damaged_index(path: Path, why: str) -> UserError:
    return UserError(
        "E-DATA-105",
        f"{path} is damaged",
        why=why,
        fix=f"remove it and run the same command again, which writes it from the units: rm {path}",
    )
