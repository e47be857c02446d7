"""Copies of a run's append-only files next to its checkpoints, in parts that are written once.

A save writes the bytes that were appended to each file since the last save. Then its commit record names all parts of
each file. A part that no record names does not count, so a killed save leaves nothing that is ahead of the checkpoint.

Small parts are merged into larger ones, as in a log-structured merge tree. A file of n saves has O(log n) parts, and
each byte is written O(log n) times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from forerun.checkpoint.log import Commit
from forerun.storage.folder import Folder, create_once
from forerun.units import MIB

FOLDER = "files"
PARTS = "parts"  # key of a checkpoint's record
LARGEST_BYTES = 32 * MIB  # maximum size of a part, which is in memory while it is written

_NAME = re.compile(r"\d+-(?P<fence>\d+)-\d+-[a-z]+-\d+")

Recorded = Mapping[str, Sequence[Sequence[Any]]]  # by file: name and bytes of each part
Attach = Callable[[Folder, str], Recorded]


class FilePart(NamedTuple):
    """A stored part of a file: its name and its size."""

    name: str
    bytes: int


class Snapshot(Protocol):
    """The content of a growing file at one moment."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, end: int) -> bytes: ...


def write_parts(
    storage: Folder, save: str, file: str, content: Snapshot, earlier: Sequence[FilePart]
) -> list[FilePart]:
    """Store the bytes of `content` that the `earlier` parts do not have, and return all parts.

    Args:
      storage: where the checkpoints are stored.
      save: the folder of the save, which is unique. It becomes a part of the names.
      file: a word that identifies the file.
      content: the file at the moment of the save.
      earlier: the parts of the last save.
    """
    kept = list(earlier)
    start = sum(part.bytes for part in kept)
    # Merge: write the last parts again if they are not larger than the bytes that follow them.
    while kept and kept[-1].bytes <= content.size - start and content.size - start < LARGEST_BYTES:
        start -= kept.pop().bytes
    while start < content.size:
        body = content.read(start, min(content.size, start + LARGEST_BYTES))
        name = f"{FOLDER}/{save}-{file}-{start}"
        if not create_once(storage, name, body):
            raise FileExistsError(0, "a part of another save has this name", name)
        kept.append(FilePart(name, len(body)))
        start += len(body)
    return kept


def read_parts(storage: Folder, parts: Iterable[FilePart]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file. It is not verified: the caller compares its digest."""
    for part in parts:
        yield from storage.blocks(part.name, 0, part.bytes)


def recorded_parts(record: Mapping[str, Any], file: str) -> list[FilePart]:
    """Return the parts of a file that a checkpoint's record names.

    Raises:
      ValueError: a name does not have the form that `write_parts` gives it, so it could name any file of this machine.
    """
    parts = [FilePart(str(name), int(size)) for name, size in record.get(PARTS, {}).get(file, ())]
    for part in parts:
        folder, _, name = part.name.partition("/")
        if folder != FOLDER or not _NAME.fullmatch(name):
            raise ValueError(f"{part.name!r} is not the name of a part")
    return parts


def remove_unnamed(storage: Folder, fence: int, commits: Iterable[Commit]) -> None:
    """Remove parts that no commit names, if the owner with the fencing number `fence` or an earlier one wrote them."""
    named = {name for commit in commits for parts in commit.record.get(PARTS, {}).values() for name, _ in parts}
    for name in storage.names(FOLDER):
        match = _NAME.fullmatch(name)
        if match and int(match["fence"]) <= fence and f"{FOLDER}/{name}" not in named:
            storage.remove(f"{FOLDER}/{name}")
