"""One side of a store, with its documents in one address space (`forerun.data.documents.Documents`).

The files of a local store are opened when they are first read. Those of a bucket are read through a `BlockReader`: all
ranges, offsets and masks that a batch needs are asked for at the same time, whether they are in one unit or in many.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.blocks import damage
from forerun.data.disk_array import DiskArray
from forerun.data.documents import DocumentCounts, Mask, Tokens
from forerun.data.reads.block_reader import BlockReader
from forerun.data.reads.bucket_array import ArrayPart, BucketArray, numbers_at, places_of, read_parts
from forerun.data.tokens.unit import token_type, unit_name
from forerun.data.tokens.unit_table import UnitTable
from forerun.storage.folder import Folder

OPEN_UNITS = 128  # each has up to three open files
# Files of offsets in a bucket are fetched completely if all of them stay in memory. Otherwise each row of a batch would
# fetch megabytes, and single blocks are fetched instead.
WHOLE_OFFSETS_BYTES = 1 << 22  # of one unit
ALL_OFFSETS_BYTES = 1 << 24  # of all units


class _Unit(NamedTuple):
    """The open files of one side of a unit. `learned` is None if all tokens have a loss."""

    tokens: DiskArray | BucketArray
    offsets: DiskArray | BucketArray
    learned: DiskArray | BucketArray | None


@dataclass(frozen=True, eq=False)
class StoredDocuments:
    """One side of a store. It implements `forerun.data.documents.Documents`.

    Args:
      reader: reads the blocks of a store in a bucket. None: a reader without cache is made if it is needed.
      extent_tokens: a range of a bucket that is not in the cache is fetched with all tokens of its extent: those
        between two multiples of this number, and one more. 0: only the range is fetched.
    """

    folder: Folder
    side: str
    vocab: int
    units: UnitTable = field(repr=False)  # entries of the index, in order
    reader: BlockReader | None = field(default=None, repr=False)
    extent_tokens: int = 0

    def __len__(self) -> int:
        return int(self._first_document[-1])

    @property
    def tokens(self) -> int:
        return int(self._first_token[-1])

    @property
    def learned(self) -> int:
        """The number of tokens with a loss."""
        return int(self.units.counts(self.side, "learned").sum())

    @property
    def masked(self) -> bool:
        return self.learned < self.tokens

    @property
    def largest(self) -> int:
        return int(self.units.counts(self.side, "largest").max(initial=0))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.units.digests(self.side)).hexdigest()[:12]

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        numbers = np.asarray(documents, np.int64)
        flat = numbers.ravel()
        if flat.size and (flat.min() < 0 or flat.max() > len(self)):
            raise IndexError(f"document {flat.max()} of {len(self)}")
        begins = np.full(flat.shape, self.tokens, np.int64)
        units = self._by_unit(flat, np.flatnonzero(flat < len(self)), self._first_document)
        if self.folder.is_local:  # unit after unit: they cannot all be open
            offsets: Iterable[NDArray[np.int64]] = (self._unit(unit).offsets.at(inside) for unit, _, inside in units)
        else:  # those of all units are fetched together
            offsets = numbers_at([(self._bucket_offsets(unit), inside) for unit, _, inside in units])
        for (unit, places, _), unit_offsets in zip(units, offsets, strict=True):
            begins[places] = self._first_token[unit] + unit_offsets
        return begins.reshape(numbers.shape)

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        numbers = np.asarray(addresses, np.int64)
        flat = numbers.ravel()
        if flat.size and (flat.min() < 0 or flat.max() >= self.tokens):
            raise IndexError(f"token {flat.max()} of {self.tokens}")
        documents = np.zeros(flat.shape, np.int64)
        units = self._by_unit(flat, np.arange(flat.size), self._first_token)
        if self.folder.is_local:
            counts: Iterable[NDArray[np.int64]] = (self._unit(unit).offsets.places_of(at) for unit, _, at in units)
        else:
            counts = places_of([(self._bucket_offsets(unit), inside) for unit, _, inside in units])
        for (unit, places, _), offsets_before in zip(units, counts, strict=True):
            documents[places] = self._first_document[unit] + offsets_before - 1
        return documents.reshape(numbers.shape)

    def _by_unit(
        self, numbers: NDArray[np.int64], places: NDArray[np.int64], firsts: NDArray[np.int64]
    ) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Group the numbers at `places` by unit: the unit, the places of its numbers, and the numbers inside of it."""
        units = np.searchsorted(firsts, numbers[places], side="right") - 1
        groups = ((unit, places[units == unit]) for unit in np.unique(units).tolist())
        return [(unit, here, numbers[here] - firsts[unit]) for unit, here in groups]

    def _bucket_offsets(self, number: int) -> BucketArray:
        offsets = self._unit(number).offsets
        assert isinstance(offsets, BucketArray)
        return offsets

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        if not 0 <= start <= stop <= self._token_starts[-1]:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        if not self.folder.is_local:
            return self._fetched([(start, stop)])[0]
        number = bisect_right(self._token_starts, start) - 1
        if start < stop <= self._token_starts[number + 1]:  # fast path: almost every row is in one unit
            return self._within(number, start, stop)
        firsts = self._token_starts
        return self._joined([self._within(n, firsts[n] + a, firsts[n] + b) for n, a, b in self._pieces(start, stop)])

    def read_many(self, starts: Sequence[int], stops: Sequence[int]) -> list[tuple[Tokens, Mask | None]]:
        """Return `read` of each range. In a bucket, all ranges are fetched at the same time."""
        if self.folder.is_local:
            return [self.read(start, stop) for start, stop in zip(starts, stops, strict=True)]
        ranges = list(zip(starts, stops, strict=True))
        for start, stop in ranges:
            if not 0 <= start <= stop <= self._token_starts[-1]:
                raise IndexError(f"tokens {start} to {stop} of {self.tokens}")
        return self._fetched(ranges)

    def _joined(self, parts: Sequence[tuple[Tokens, Mask | None]]) -> tuple[Tokens, Mask | None]:
        if len(parts) == 1:
            return parts[0]
        if all(mask is None for _, mask in parts):
            return np.concatenate([ids for ids, _ in parts] or [np.zeros(0, self._type)]), None
        masks = [np.ones(len(ids), np.bool_) if mask is None else mask for ids, mask in parts]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate(masks)

    def _fetched(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[Tokens, Mask | None]]:
        """Return ranges of a store in a bucket, with one call of the reader."""
        wanted: list[ArrayPart] = []
        pieces: list[list[tuple[int, int, int, bool]]] = []  # of each range: unit, local start and stop, whether masked
        for start, stop in ranges:
            pieces.append([])
            for number, a, b in self._pieces(start, stop):
                unit, around = self._unit(number), self._extent(number, a, b)
                wanted.append(ArrayPart(unit.tokens, a, b, around))  # type: ignore[arg-type]
                if unit.learned is not None:
                    bits = None if around is None else (around[0] // 8, -(-around[1] // 8))
                    wanted.append(ArrayPart(unit.learned, a // 8, -(-b // 8), bits))  # type: ignore[arg-type]
                pieces[-1].append((number, a, b, unit.learned is not None))
        content = iter(read_parts(wanted))
        return [
            self._joined(
                [(next(content), _unpacked(next(content), a, b) if masked else None) for _, a, b, masked in one]
            )
            for one in pieces
        ]

    def _extent(self, number: int, start: int, stop: int) -> tuple[int, int] | None:
        """Return the tokens of a unit that are fetched with a range of it; None: no others."""
        size = self.extent_tokens
        if not size:
            return None
        first = self._token_starts[number]
        extent = (first + start) // size
        last = max(extent, (first + stop - 2) // size)  # the last token of a row is the first one of the next extent
        end = self._token_starts[number + 1] - first
        return max(extent * size - first, 0), min((last + 1) * size + 1 - first, end)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the unit, and the start and stop inside of it, of each piece of a range."""
        number = bisect_right(self._token_starts, start) - 1
        while start < stop:
            first, end = self._token_starts[number], min(stop, self._token_starts[number + 1])
            if end > start:
                yield number, start - first, end - first
            start, number = max(start, end), number + 1

    def _within(self, number: int, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        first, unit = self._token_starts[number], self._unit(number)
        bits = None if unit.learned is None else _bits(unit.learned, start - first, stop - first)
        return unit.tokens.read(start - first, stop - first), bits

    @property
    def counts(self) -> DocumentCounts:
        longest, single, targets = (self.units.counts(self.side, name) for name in ("longest", "single", "targets"))
        return DocumentCounts(int(longest.max(initial=0)), int(single.sum()), int(targets.sum()))

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
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.units.counts(self.side, what))])

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

    @cached_property
    def _reader(self) -> BlockReader:
        return self.reader or BlockReader(self.folder)

    def _open(self, unit: dict[str, Any]) -> _Unit:
        about = unit["sides"][self.side]
        if not self.folder.is_local:
            return self._open_in_bucket(unit, about)
        name = f"{unit_name(unit['unit'], unit['of'])}/{self.side}"

        def array(what: str, dtype: type[Any], count: int) -> DiskArray:
            path = Path(self.folder.address) / f"{name}.{what}"
            return _array(path, dtype, count, unit["blocks"][f"{self.side}.{what}"])

        tokens = array("tokens", self._type, about["tokens"])
        offsets = array("offsets", np.int64, about["documents"] + 1)
        bits = None
        if about["learned"] < about["tokens"]:
            bits = array("learned", np.uint8, -(-about["tokens"] // 8))
        return _Unit(tokens, offsets, bits)

    def _open_in_bucket(self, unit: dict[str, Any], about: dict[str, Any]) -> _Unit:
        """Return the arrays of a unit. Nothing is read, because the index has their sizes."""
        home, count = unit_name(unit["unit"], unit["of"]), about["documents"] + 1

        def array(what: str, dtype: type[Any], count: int, **options: Any) -> BucketArray:
            name = f"{self.side}.{what}"
            return BucketArray(self._reader, f"{home}/{name}", dtype, count, unit["blocks"][name], **options)

        kept = self.extent_tokens > 0 and self._reader.cache is None
        all_bytes = 8 * (len(self) + len(self.units))
        whole = all_bytes <= ALL_OFFSETS_BYTES and 8 * count <= WHOLE_OFFSETS_BYTES
        offsets = array("offsets", np.int64, count, is_kept=True, is_whole=whole, ends=(0, about["tokens"]))
        bits = None
        if about["learned"] < about["tokens"]:
            bits = array("learned", np.uint8, -(-about["tokens"] // 8), is_kept=kept)
        return _Unit(array("tokens", self._type, about["tokens"], is_kept=kept), offsets, bits)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without open files and the lock."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_lock", "_reader")}


def _array(path: Path, dtype: type[Any], count: int, root: str) -> DiskArray:
    wanted = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size != wanted:
            raise damage(path, f"it has {size} bytes, but {wanted} were written")
        return DiskArray(path, np.dtype(dtype).newbyteorder("<"), root)
    except FileNotFoundError:
        raise damage(path, "it is missing") from None


def _bits(packed: DiskArray | BucketArray, start: int, stop: int) -> Mask:
    return _unpacked(packed.read(start // 8, -(-stop // 8)), start, stop)


def _unpacked(packed: NDArray[np.uint8], start: int, stop: int) -> Mask:
    """Return the bits `start` .. `stop - 1`, of which `packed` holds the bytes."""
    bits = np.unpackbits(packed, bitorder="little")
    return bits[start % 8 : start % 8 + stop - start].astype(np.bool_)
