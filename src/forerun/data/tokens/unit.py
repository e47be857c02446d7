"""Units: parts of a store that are built independently. Each unit is one folder, which appears atomically.

The pieces of a unit depend only on the sizes of the files, so any number of workers and shards builds the same units.
The files of a unit are written to a temporary folder of this machine and then published:

- In a folder, one rename makes the unit visible.
- In a bucket, each file is created with a condition, and the summary last. A unit exists if its summary exists.

The bytes of a unit depend only on the data and the recipe. A file that exists already, because a writer was killed or
another machine builds the same unit, is therefore equal. It is compared, and replaced if it is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from forerun.data import checked_json
from forerun.data.blocks import SUFFIX, BlockSums, damage
from forerun.data.source.identity import cache_folder
from forerun.data.source.rows import BadRow, FilePiece, RowPlace
from forerun.data.tokens.document import Encoded, Mask
from forerun.data.tokens.protection import Ids
from forerun.data.tokens.recipe import FORMAT
from forerun.errors import DISK_ERRORS, StorageError, UserError
from forerun.storage.folder import FileRange, Folder, remove_command
from forerun.storage.open_folder import folder_at
from forerun.units import GIB, MIB

LEFTOVER_SECONDS = 2 * 24 * 3600.0
COMPARED_BYTES = 1 << 24  # read at a time when a published file is compared


def local_folder(store: Folder) -> Path:
    """Return the folder of this machine for files that belong to a store, such as packing plans and unfinished units.

    It is the folder of the store itself, or a folder of the cache for a store in a bucket.
    """
    if store.is_local:
        return Path(store.address)
    return cache_folder() / "stores" / store.address.rpartition("/")[2]


def publish(written: Path, store: Folder, name: str, summary: str) -> None:
    """Make the files of the folder `written` visible as the unit `name`, and remove the folder.

    If another process has published the unit in the meantime, its files are kept.

    Args:
        written: A temporary folder with all files of the unit.
        store: The store.
        name: The name of the unit.
        summary: The name of the file that is created last.
    """
    if store.is_local:
        final = Path(store.address) / name
        try:
            written.rename(final)
        except OSError:
            if not (final / summary).exists():
                raise
            shutil.rmtree(written)
        return
    unit = store.inside(name)
    if unit.read_many([summary]) == [None]:
        others = sorted(file.name for file in written.iterdir() if file.name != summary)
        for file in [*others, summary]:
            content = (written / file).read_bytes()
            if not unit.create(file, content) and not _is_equal(unit, file, content):
                unit.replace(file, content)
    shutil.rmtree(written)


def _is_equal(unit: Folder, file: str, content: bytes) -> bool:
    """Return whether a published file has this content. Large files are read in parts."""
    size = len(content)
    for start in range(0, size, COMPARED_BYTES):
        stop = min(start + COMPARED_BYTES, size)
        if unit.read_ranges([FileRange(file, start, stop)]) != [content[start:stop]]:
            return False
    return unit.read_ranges([FileRange(file, size, size + 1)]) == [b""]


def part_name(name: str) -> str:
    """Return a unique temporary name that contains a hash of the host and the process id of the writer.

    An example is `unit-00012-of-00096.1f2e3d4c-4711-9a8b7c6d.part`.
    """
    return f"{name}.{_host_digest()}-{os.getpid()}-{os.urandom(4).hex()}.part"


def remove_leftovers(store: Folder) -> None:
    """Remove temporary files and folders of writers that have ended.

    For writers on this machine only the process counts, not the age: a clock that jumps must not destroy the work of
    a live process. Files of other machines are removed if they have not changed for two days.
    """
    for part in local_folder(store).glob("*.part"):
        host, process, *_ = [*part.name.split(".")[-2].split("-"), ""]  # names of `atomic_write` have no process
        try:
            old = time.time() - part.stat().st_mtime > LEFTOVER_SECONDS
        except OSError:
            continue
        if not _is_running(process) if host == _host_digest() else old:
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def _is_running(process: str) -> bool:
    """Return whether a process is running. A zombie, which is still in /proc with the state Z, is not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _host_digest() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


SIDES = ("train", "validation")
SUMMARY, SKIPPED = "unit.json", "skipped.jsonl"
SUMMARIES_AT_ONCE = 1024

Token = type[np.uint16] | type[np.uint32]


@dataclass(frozen=True)
class Unit:
    """Consecutive pieces of a source that become one folder of a store."""

    number: int
    count: int
    pieces: tuple[FilePiece, ...]
    size_bytes: int

    @property
    def name(self) -> str:
        return unit_name(self.number, self.count)

    def to_json(self) -> dict[str, Any]:
        pieces = [[piece.file, piece.start, piece.stop, piece.rows] for piece in self.pieces]
        return {"number": self.number, "count": self.count, "pieces": pieces, "size_bytes": self.size_bytes}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Unit:
        return Unit(**values | {"pieces": tuple(FilePiece(*piece) for piece in values["pieces"])})


def unit_name(number: int, count: int) -> str:
    return f"unit-{number:05d}-of-{count:05d}"


def unit_bytes(total_bytes: int) -> int:
    """Return the target size of a unit: 1/1024 of all files, at least 2 MiB and at most 1 GiB."""
    return min(GIB, max(2 * MIB, total_bytes // 1024))


def units_of(source: Any) -> list[Unit]:
    """Return the units of a source: all its pieces, in order, in groups of about `unit_bytes`."""
    sizes = [file.size_bytes() for file in source.files]
    wanted = unit_bytes(sum(max(size, 0) for size in sizes))
    pieces: list[FilePiece] = source.pieces(wanted)
    many = Counter(piece.file for piece in pieces)
    seen: Counter[int] = Counter()
    groups: list[list[FilePiece]] = []
    filled: list[int] = []
    for piece in pieces:
        whole, parts, at = sizes[piece.file], many[piece.file], seen[piece.file]
        seen[piece.file] += 1
        size = whole * (at + 1) // parts - whole * at // parts if whole >= 0 else wanted
        if not groups or filled[-1] + size > wanted * 3 // 2:
            groups.append([])
            filled.append(0)
        groups[-1].append(piece)
        filled[-1] += size
    return [Unit(number, len(groups), tuple(group), filled[number]) for number, group in enumerate(groups)]


def token_type(vocab: int) -> Token:
    """Return the type of token ids on disk."""
    return np.uint16 if vocab <= 1 << 16 else np.uint32


class UnitWriter:
    """A writer of one unit. It writes to a temporary folder, which `finish` publishes."""

    def __init__(self, store: Path | Folder, unit: Unit, vocab: int) -> None:
        self.unit, self._store = unit, folder_at(store)
        self._folder = local_folder(self._store) / part_name(unit.name)
        self._folder.mkdir(parents=True)
        self._sides = {side: _SideWriter(self._folder, side, token_type(vocab)) for side in SIDES}
        self._skipped = _File(self._folder, SKIPPED)
        self.rows = self.bad = 0
        self._bad_files: list[str] = []

    @property
    def documents(self) -> int:
        return sum(side.documents for side in self._sides.values())

    @property
    def tokens(self) -> int:
        return sum(side.tokens for side in self._sides.values())

    def add(self, side: str, rows: Sequence[Encoded]) -> None:
        """Write encoded rows to the training or the validation side."""
        self.rows += len(rows)
        self._sides[side].add(rows)

    def skip(self, bad: BadRow) -> None:
        """Record a bad row or file that is skipped. `bad` has its absolute place."""
        if bad.whole_file:
            self._bad_files.append(bad.place.file)
        else:
            self.rows += 1
            self.bad += 1
        self._skipped.write(json.dumps(bad_json(bad), ensure_ascii=True).encode() + b"\n")

    def finish(self) -> dict[str, Any]:
        """Write the summary with all checksums, publish the unit, and return the summary."""
        sides = {side: writer.finish() for side, writer in self._sides.items()}
        kept = [file for writer in self._sides.values() for file in writer.kept]
        files = {file.name: file.about() for file in kept} | {SKIPPED: self._skipped.close()}
        blocks: dict[str, str] = {}
        for file in kept:
            sums, blocks[file.name] = file.write_sums()
            files[sums.name] = sums.about()
        summary = {
            "format": FORMAT,
            "unit": self.unit.number,
            "of": self.unit.count,
            "rows": self.rows,
            "bad": self.bad,
            "bad_files": self._bad_files,
            "sides": sides,
            "files": files,
            "blocks": blocks,
        }
        about = _File(self._folder, SUMMARY)
        about.write(checked_json.encode(summary, indent=1))
        about.close()
        publish(self._folder, self._store, self.unit.name, SUMMARY)
        return summary

    def abandon(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class _SideWriter:
    """A writer of one side of a unit: tokens, offsets and loss mask.

    The offsets (one more than documents) count tokens from the start of the unit. The mask has one bit per token. It
    is omitted if all tokens have a loss. Counts that would need all offsets later are recorded in the summary: tokens
    of the longest document (`longest`), documents of less than two tokens (`single`), and tokens with a loss that are
    not the first of their document (`targets`).
    """

    def __init__(self, folder: Path, side: str, dtype: Token) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens, self._offsets, self._learned = (
            _File(folder, f"{side}.{name}") for name in ("tokens", "offsets", "learned")
        )
        self._offsets.write(np.zeros(1, "<i8").tobytes())
        self._bits: NDArray[np.bool_] = np.zeros(0, np.bool_)  # the last bits, which do not fill a byte yet
        self.documents = self.tokens = self.learned = self.largest = 0
        self.longest = self.single = self.targets = 0
        self.kept: list[_File] = []

    def add(self, rows: Sequence[Encoded]) -> None:
        if not rows:
            return
        documents = [document for row in rows for document in row.documents]
        ids = np.concatenate([tokens for tokens, _ in documents])
        lengths = np.asarray([len(tokens) for tokens, _ in documents])
        ends = self.tokens + np.cumsum(lengths)
        self.largest = max(self.largest, int(ids.max()))
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self._offsets.write(ends.astype("<i8").tobytes())
        before = self.learned
        self._write_mask(documents, len(ids))
        self.longest = max(self.longest, int(lengths.max()))
        self.single += int(np.count_nonzero(lengths < 2))
        first = sum(len(tokens) > 0 and (mask is None or bool(mask[0])) for tokens, mask in documents)
        self.targets += self.learned - before - first
        self.documents += len(documents)
        self.tokens += len(ids)

    def _write_mask(self, documents: Sequence[tuple[Ids, Mask | None]], tokens: int) -> None:
        """Append the loss masks of documents. Bits that do not fill a byte are kept for the next call."""
        masks = [np.ones(len(ids), np.bool_) if learned is None else learned for ids, learned in documents]
        if all(learned is None for _, learned in documents):
            masks = [np.ones(tokens, np.bool_)]
        bits = np.concatenate([self._bits, *masks])
        whole = len(bits) // 8 * 8
        self._learned.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self.learned += int(np.count_nonzero(bits[len(self._bits) :]))
        self._bits = bits[whole:]

    def finish(self) -> dict[str, Any]:
        self._learned.write(np.packbits(self._bits, bitorder="little").tobytes())
        for file in (self._tokens, self._offsets, self._learned):
            file.close()
        self.kept = [self._tokens, self._offsets]
        if self.learned < self.tokens:
            self.kept.append(self._learned)
        else:
            self._learned.path.unlink()
        if not self.documents:
            for file in self.kept:
                file.path.unlink()
            self.kept = []
        digest = hashlib.sha256("".join(file.sha256 for file in self.kept).encode()).hexdigest()[:16]
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "learned": self.learned,
            "largest": self.largest,
            "digest": digest,
            "longest": self.longest,
            "single": self.single,
            "targets": self.targets,
        }


class _File:
    """A file whose checksums are computed while it is written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path = name, folder / name
        self._out: IO[bytes] = self.path.open("wb")
        self._hash = hashlib.sha256()
        self._blocks = BlockSums()
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._blocks.update(data)
        self.size_bytes += len(data)
        self._out.write(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def about(self) -> dict[str, Any]:
        return {"bytes": self.size_bytes, "sha256": self.sha256}

    def close(self) -> dict[str, Any]:
        if not self._out.closed:
            self._out.flush()
            os.fsync(self._out.fileno())
            self._out.close()
        return self.about()

    def write_sums(self) -> tuple[_File, str]:
        """Write the checksums of the blocks next to the file; return that file and the root."""
        content, root = self._blocks.finish()
        sums = _File(self.path.parent, self.name + SUFFIX)
        sums.write(content)
        sums.close()
        return sums, root


def summary_of(store: Path | Folder, name: str) -> dict[str, Any] | None:
    """Return the summary of a finished unit, or None if it is missing or damaged.

    Also return None if a file of the unit is missing or has the wrong size. In a bucket, the other files are not looked
    at: they were created before the summary, each with its complete content.
    """
    store = folder_at(store)
    try:
        summary = checked_json.decode(store.read(f"{name}/{SUMMARY}"))
        if not store.is_local:
            return summary
        home = Path(store.address) / name
        sizes = {file: (home / file).stat().st_size for file in summary["files"]}
    except (OSError, ValueError, KeyError):
        return None
    return summary if all(sizes[file] == about["bytes"] for file, about in summary["files"].items()) else None


def listed_units(store: Folder) -> set[str]:
    """Return the names of the units that exist, by one listing. Whether they are damaged is not looked at."""
    if store.is_local:
        return {name for name in store.names() if name.startswith("unit-")}
    return {name.removesuffix(f"/{SUMMARY}") for name in store.files() if name.endswith(f"/{SUMMARY}")}


def summaries_of(store: Folder, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and summaries of those units that are finished.

    A bucket is listed once, and the summaries are read many at a time. A unit that lacks a file is not finished.
    """
    if store.is_local:
        yield from ((name, summary) for name in names if (summary := summary_of(store, name)) is not None)
        return
    files = store.files()
    listed = [name for name in names if f"{name}/{SUMMARY}" in files]
    for first in range(0, len(listed), SUMMARIES_AT_ONCE):
        some = listed[first : first + SUMMARIES_AT_ONCE]
        for name, content in zip(some, store.read_many([f"{name}/{SUMMARY}" for name in some]), strict=True):
            try:
                summary = checked_json.decode(content or b"")
                if all(f"{name}/{file}" in files for file in summary["files"]):
                    yield name, summary
            except (ValueError, KeyError):
                continue


def bad_json(bad: BadRow) -> dict[str, Any]:
    """Return a bad row in types of JSON, as recorded in a unit."""
    place = {"file": bad.place.file, "number": bad.place.number, "word": bad.place.word}
    return place | {"code": bad.code, "what": bad.what, "why": bad.why, "fix": bad.fix, "whole_file": bad.whole_file}


def bad_from(record: dict[str, Any]) -> BadRow:
    """Return the bad row of a record."""
    place = RowPlace(record["file"], record["number"], record["word"])
    return BadRow(record["code"], record["what"], record["why"], record["fix"], place, record["whole_file"])


def read_skipped(store: Path | Folder, names: Iterable[str]) -> Iterator[BadRow]:
    """Yield the skipped rows and files, in the order of the data. Raise UserError if one is damaged."""
    folder = folder_at(store)
    for name in names:
        summary = summary_of(folder, name)
        if summary is None:
            raise unit_damage(
                folder, f"{name}/{SUMMARY}", "it differs from its checksum, or a file of the unit is missing"
            )
        content = folder.read(f"{name}/{SKIPPED}")
        if hashlib.sha256(content).hexdigest() != summary["files"][SKIPPED]["sha256"]:
            raise unit_damage(folder, f"{name}/{SKIPPED}", "it differs from its checksum")
        for line in content.splitlines():
            yield bad_from(json.loads(line))


def unit_damage(store: Folder, file: str, why: str) -> UserError:
    """Return the error for a damaged file of a unit, such as `unit-00003-of-00012/train.tokens`."""
    if store.is_local:
        return damage(Path(store.address) / file, why)
    unit = remove_command(f"{store.address}/{file.partition('/')[0]}", whole_folder=True)
    return UserError(
        "E-DATA-175",
        f"{store.address}/{file} is damaged",
        why=why,
        fix="remove its unit and the index, then run the same command again, which rebuilds only that unit: "
        f"{unit} && {remove_command(f'{store.address}/index.json', whole_folder=False)}",
    )


def storage_error(store: Path | Folder, error: OSError) -> UserError:
    """Return the error for a store that cannot be written.

    A disk that is full or fails may recover, so a supervisor retries after a StorageError.
    """
    kind = StorageError if error.errno in DISK_ERRORS else UserError
    return kind(
        "E-DATA-112",
        f"the tokens cannot be stored in {folder_at(store).address}",
        why=f"{type(error).__name__}: {error}",
        fix="free space on that disk, or name another folder: data.store=FOLDER; finished units are kept",
    )
