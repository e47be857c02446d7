"""The store of tokenized documents on disk: immutable, with checksums and random access.

A store is a folder of units and an index. Opening it reads only the index. The files of a unit are opened when they
are first read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from forerun.data.blocks import BlockSums
from forerun.data.reads.store_reads import StoreReads
from forerun.data.source.rows import BadRow
from forerun.data.tokens.recipe import FORMAT
from forerun.data.tokens.stored_documents import StoredDocuments
from forerun.data.tokens.unit import SUMMARY, local_folder, read_skipped, summaries_of, unit_damage, unit_name
from forerun.data.tokens.unit_table import UnitTable, decode_index
from forerun.errors import UserError
from forerun.storage.folder import FileRange, Folder, remove_command
from forerun.storage.open_folder import folder_at

INDEX = "index.json"
CHUNK_BYTES = 1 << 22  # of a request when a complete file is compared with its checksum
CHUNKS_AT_ONCE = 8


class TokenCounts(NamedTuple):
    """Counts of one side of a store, or of both."""

    documents: int
    tokens: int
    learned: int  # tokens with a loss


@dataclass(frozen=True)
class TokenStore:
    """An open store with its two sides."""

    folder: Folder
    train: StoredDocuments
    validation: StoredDocuments | None  # None: no document is held out
    rows: int  # including bad ones
    bad: int

    @property
    def counts(self) -> TokenCounts:
        sides = [self.train] if self.validation is None else [self.train, self.validation]
        return TokenCounts(
            *(sum(column) for column in zip(*((len(s), s.tokens, s.learned) for s in sides), strict=True))
        )

    @property
    def skipped(self) -> Iterator[BadRow]:
        """The skipped rows and files, in the order of the data."""
        units = self.train.units
        names = [unit_name(unit["unit"], unit["of"]) for unit in map(units.__getitem__, units.faulty)]
        return read_skipped(self.folder, names)

    @property
    def local_folder(self) -> Path:
        """The folder of this machine for files that belong to the store, such as packing plans."""
        return local_folder(self.folder)


def open_store(folder: Path | Folder, *, reads: StoreReads | None = None) -> TokenStore:
    """Open the store in `folder`.

    `reads` has the counts and the cache for a store in a bucket. Raise UserError if the store is not finished or is
    damaged.
    """
    folder = folder_at(folder)
    index = _index(folder)
    units: UnitTable = index["units"]
    vocab = index["recipe"]["vocab"]
    reader = None if folder.is_local else (reads or StoreReads()).reader(folder)
    train, kept = (StoredDocuments(folder, side, vocab, units, reader) for side in ("train", "validation"))
    rows, bad = (int(units.column(name).sum()) for name in ("rows", "bad"))
    return TokenStore(folder, train, kept if len(kept) else None, rows, bad)


def read_index(folder: Path | Folder) -> dict[str, Any]:
    """Return the index of a finished store. Its `units` are a `UnitTable`."""
    return _index(folder_at(folder))


def index_entry(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a unit's summary that the index holds."""
    return {key: summary[key] for key in ("unit", "of", "rows", "bad", "bad_files", "sides", "blocks")}


def _index(folder: Folder) -> dict[str, Any]:
    try:
        index = decode_index(folder.read(INDEX))
    except FileNotFoundError:
        raise UserError(
            "E-DATA-104",
            f"{folder.address} is not a finished store",
            why=f"it has no {INDEX}",
            fix="run the same command again, or run the missing shards",
        ) from None
    except (ValueError, KeyError) as error:
        raise _damaged_index(folder, str(error)) from None
    if index.get("format") != FORMAT:
        raise _damaged_index(folder, f"its format is {index.get('format')}, and this version reads {FORMAT}")
    return index


def check(store: Path | Folder) -> None:
    """Read all files, and raise UserError for the first one that differs from its checksum."""
    folder = folder_at(store)
    index = _index(folder)
    names = [unit_name(unit["unit"], unit["of"]) for unit in index["units"]]
    summaries = dict(summaries_of(folder, names))
    for name, unit in zip(names, index["units"], strict=True):
        summary = summaries.get(name)
        if summary is None:
            why = "it differs from its checksum, or a file of the unit is missing or has another size"
            raise unit_damage(folder, f"{name}/{SUMMARY}", why)
        if any(summary.get(key) != value for key, value in unit.items()):
            raise unit_damage(folder, f"{name}/{SUMMARY}", f"it differs from {INDEX}")
        roots = {file: _compared(folder, f"{name}/{file}", **about) for file, about in summary["files"].items()}
        for file, root in summary["blocks"].items():
            if roots[file] != root:
                raise unit_damage(folder, f"{name}/{file}", "the checksums of its blocks differ")


def _compared(folder: Folder, file: str, *, bytes: int, sha256: str) -> str:
    """Compare a file with its size and checksum, and return the root of the checksums of its blocks."""
    digest, blocks = hashlib.sha256(), BlockSums()
    ranges = [FileRange(file, at, min(at + CHUNK_BYTES, bytes)) for at in range(0, bytes, CHUNK_BYTES)]
    for first in range(0, len(ranges), CHUNKS_AT_ONCE):
        for data in folder.read_ranges(ranges[first : first + CHUNKS_AT_ONCE]):
            digest.update(data)
            blocks.update(data)
    if digest.hexdigest() != sha256:
        raise unit_damage(folder, file, f"its checksum is {digest.hexdigest()[:12]}, but {sha256[:12]} is recorded")
    return blocks.finish()[1]


def _damaged_index(folder: Folder, why: str) -> UserError:
    path = f"{folder.address}/{INDEX}"
    remove = remove_command(path, whole_folder=False)
    return UserError(
        "E-DATA-105",
        f"{path} is damaged",
        why=why,
        fix=f"remove it and run the same command again, which writes it from the units: {remove}",
    )
