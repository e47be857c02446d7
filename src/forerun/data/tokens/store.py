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

from forerun.data import checked_json
from forerun.data.blocks import SUFFIX, BlockSums, damage
from forerun.data.source.identity import cache_folder
from forerun.data.source.rows import BadRow
from forerun.data.storage.folder import StoreFolder, folder_at
from forerun.data.storage.store_reads import StoreReads
from forerun.data.tokens.recipe import FORMAT
from forerun.data.tokens.stored_documents import StoredDocuments
from forerun.data.tokens.unit import SKIPPED, SUMMARY, read_skipped, summary_of, unit_name
from forerun.errors import UserError
from forerun.files import atomic_write

INDEX = "index.json"
CHUNK_BYTES = 1 << 22  # read at a time when a complete file is compared with its checksum


class TokenCounts(NamedTuple):
    """Counts of one side of a store, or of both."""

    documents: int
    tokens: int
    learned: int  # tokens with a loss


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


def open_store(folder: Path | StoreFolder, *, verify: bool = False, reads: StoreReads | None = None) -> TokenStore:
    """Open the store in `folder`. With `verify`, first compare all files with their checksums.

    `reads` has the counts and the cache for a store in a bucket. Raise UserError if the store is not finished or is
    damaged.
    """
    folder = folder_at(folder)
    if verify:
        check(folder)
    index, checked = _index(folder)
    units = index["units"]
    vocab = index["recipe"]["vocab"]
    reader = None if folder.is_local else (reads or StoreReads()).reader(folder)
    train, kept = (StoredDocuments(folder, side, vocab, units, reader) for side in ("train", "validation"))
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


def _damaged_index(path: Path, why: str) -> UserError:
    return UserError(
        "E-DATA-105",
        f"{path} is damaged",
        why=why,
        fix=f"remove it and run the same command again, which writes it from the units: rm {path}",
    )
