"""From `data.path` to rows: the files it names, what they were recognised as, and their rows piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.data.source import files, identity, readers
from forerun.data.source.columns import Columns
from forerun.data.source.rows import Bad, Piece, Place, Row
from forerun.errors import UserError

if TYPE_CHECKING:
    from forerun.config.schema import Data, Part


@dataclass(frozen=True)
class Source:
    """Files of one kind, sorted, whose rows are all of one form."""

    files: tuple[files.File, ...]
    form: str
    columns: Mapping[str, str]  # role to column, as the job gives them
    separator: str | None = None  # of documents in a text

    @property
    def kind(self) -> str:
        return self.files[0].kind

    @property
    def recognised(self) -> str:
        """For the display: `3 files, jsonl, chat, column messages`."""
        many = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        split = "" if self.separator is None else f", split at {self.separator!r}"
        return f"{many}, {self.kind}" + ("" if self.kind == "text" else f", {self._roles.shown}") + split

    @property
    def size_bytes(self) -> int:
        """Of all files, as they lie; what a store does not tell counts as nothing."""
        return sum(max(file.size_bytes(), 0) for file in self.files)

    def pieces(self, piece_bytes: int) -> list[Piece]:
        """All files in parts of about `piece_bytes`; their rows, one part after the other, are all rows."""
        return [piece for at in range(len(self.files)) for piece in self._pieces(at, piece_bytes)]

    def rows(self, piece: Piece) -> Iterator[Row | Bad]:
        """The rows of one piece, bad ones among them; places count inside the piece."""
        return readers.rows(self.files[piece.file], self._roles, piece, self.separator)

    def resolve(self, piece: Piece, place: Place) -> Place:
        """A place that counts inside `piece` as one that counts from the front of the file, which is read up to it."""
        if place.number is None or piece.start == 0:
            return place
        return place._replace(number=place.number + readers.before(self.files[piece.file], piece, self.separator))

    def identities(self) -> list[str]:
        """A digest of each file's content, or what its store says of it."""
        return identity.identities(self.files)

    def to_json(self) -> dict[str, Any]:
        """What another process needs to read the same; only JSON's own types."""
        return {
            "files": [[file.address, file.kind, file.packed] for file in self.files],
            "form": self.form,
            "columns": dict(self.columns),
            "separator": self.separator,
        }

    @classmethod
    def from_json(cls, made: Mapping[str, Any] | str) -> Source:
        given = json.loads(made) if isinstance(made, str) else made
        found = tuple(files.at_address(*file) for file in given["files"])
        return cls(found, given["form"], dict(given["columns"]), given.get("separator"))

    def _pieces(self, at: int, piece_bytes: int) -> list[Piece]:
        return readers.pieces(self.files[at], at, piece_bytes, self.separator)

    @property
    def _roles(self) -> Columns:
        return Columns(self.form, self.columns)


def open_source(part: Part | Data) -> Source:
    """What `part` names. The first file that can be read tells the form; if none can, the first fault is raised."""
    found = tuple(files.find(part.path or ""))
    if found[0].kind == "text" and part.columns:
        raise UserError(
            "data.columns: plain text has no columns",
            why=f"{found[0].name} is read as text, by its ending",
            fix="leave data.columns out, or give JSONL, CSV, Parquet or Arrow",
        )
    first: Bad | None = None
    for file in found:
        columns = readers.recognise(file, part.columns)
        if isinstance(columns, Columns):
            _require_text(columns.form, part.separator, file)
            return Source(found, columns.form, dict(part.columns), part.separator)
        first = first or columns
    assert first is not None
    raise first.error()


def _require_text(form: str, separator: str | None, file: files.File) -> None:
    if separator is not None and form != "text":
        raise UserError(
            "data.separator divides texts into documents",
            why=f"{file.name} holds {form}, and each row is a document already",
            fix="remove data.separator; in a mixture, give it to the parts of plain text only",
        )
