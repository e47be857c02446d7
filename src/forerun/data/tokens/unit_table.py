"""The units of an index as columns of numbers.

A store of 15T tokens has 52,000 units. Nested dictionaries of their entries need 92 MB, eight times the memory of the
columns, and each process of each host has them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from forerun.data import checked_json

SIDES = ("train", "validation")
COUNTS = ("documents", "tokens", "learned", "largest", "longest", "single", "targets")
DIGEST_CHARACTERS = 16
_UNITS = '"units":['


class UnitTable(Sequence[dict[str, Any]]):
    """A sequence of the entries of an index. `table[number]` is the entry as a dictionary, made when it is asked for.

    Args:
        units: The entries.

    Raises:
        ValueError: An entry is not one that forerun writes.
    """

    def __init__(self, units: Iterable[dict[str, Any]]) -> None:
        numbers = {name: array("q") for name in ("unit", "of", "rows", "bad")}
        counts = {side: {name: array("q") for name in COUNTS} for side in SIDES}
        digests = {side: bytearray() for side in SIDES}
        roots: dict[str, bytearray] = {}
        self._bad_files: dict[int, list[str]] = {}
        try:
            for number, unit in enumerate(units):
                for name in ("unit", "of", "rows", "bad"):
                    numbers[name].append(unit[name])
                if unit["bad_files"]:
                    self._bad_files[number] = unit["bad_files"]
                for side in SIDES:
                    about = unit["sides"][side]
                    digests[side] += _digest(about["digest"])
                    for name in COUNTS:
                        counts[side][name].append(about[name])
                for name, root in unit["blocks"].items():
                    # A file that earlier units do not have begins with empty roots for them.
                    column = roots.setdefault(name, bytearray())
                    column += bytes(DIGEST_CHARACTERS * number - len(column)) + _digest(root)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"the entry of unit {number} is damaged: {type(error).__name__} {error}") from None
        count = len(numbers["unit"])
        self._numbers = {name: np.frombuffer(column, np.int64) for name, column in numbers.items()}
        self._counts = {
            side: {name: np.frombuffer(column, np.int64) for name, column in columns.items()}
            for side, columns in counts.items()
        }
        self._digests = {side: bytes(column) for side, column in digests.items()}
        self._roots = {name: bytes(column.ljust(DIGEST_CHARACTERS * count, b"\0")) for name, column in roots.items()}

    def __len__(self) -> int:
        return len(self._numbers["unit"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, number: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(number, slice):
            return [self[one] for one in range(len(self))[number]]
        number = range(len(self))[number]
        entry: dict[str, Any] = {name: int(self._numbers[name][number]) for name in ("unit", "of", "rows", "bad")}
        entry["bad_files"] = self._bad_files.get(number, [])
        entry["sides"] = {side: self._side(side, number) for side in SIDES}
        roots = {name: _at(column, number) for name, column in self._roots.items()}
        entry["blocks"] = {name: root for name, root in roots.items() if root}
        return entry

    def column(self, name: str) -> NDArray[np.int64]:
        """Return `unit`, `of`, `rows` or `bad` of all units."""
        return self._numbers[name]

    def counts(self, side: str, name: str) -> NDArray[np.int64]:
        """Return a count of one side of all units."""
        return self._counts[side][name]

    def digests(self, side: str) -> bytes:
        """Return the digests of one side of all units, one after the other."""
        return self._digests[side]

    @property
    def faulty(self) -> list[int]:
        """The units in which rows or files were skipped."""
        return sorted({*np.flatnonzero(self._numbers["bad"]).tolist(), *self._bad_files})

    def _side(self, side: str, number: int) -> dict[str, Any]:
        counts = {name: int(column[number]) for name, column in self._counts[side].items()}
        return counts | {"digest": _at(self._digests[side], number)}


def decode_index(raw: bytes) -> dict[str, Any]:
    """Return an index, with a UnitTable as its `units`.

    The entries are decoded one after the other, so that there are never dictionaries of all units.

    Raises:
        ValueError: The bytes are not an index, or differ from their checksum.
    """
    checked_json.require_checksum(raw)
    text = raw.decode()
    at = text.rindex(_UNITS)
    header = json.loads(text[:at] + '"units":[]}')
    return header | {"units": UnitTable(_entries(text, at + len(_UNITS)))}


def _entries(text: str, at: int) -> Iterator[dict[str, Any]]:
    decode = json.JSONDecoder().raw_decode
    if text[at] == "]":
        return
    while True:
        entry, at = decode(text, at)
        yield entry
        if text[at : at + 1] == "]":
            return
        if text[at : at + 1] != ",":
            raise ValueError("it is not an index")
        at += 1


def _digest(text: str) -> bytes:
    content = text.encode()
    if len(content) != DIGEST_CHARACTERS:
        raise ValueError(f"{text[:40]} is not a digest")
    return content


def _at(column: bytes, number: int) -> str:
    return column[DIGEST_CHARACTERS * number : DIGEST_CHARACTERS * (number + 1)].strip(b"\0").decode()
