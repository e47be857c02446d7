"""The texts of a data section, for training and measuring a tokenizer: read one after the other, never all together.

Rows are read by the same readers as for a training run. A part of the texts is held out: a tokenizer is not trained on
them, so they show how it splits unseen text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.config.schema import Data
from forerun.data.source.rows import BadRow
from forerun.data.source.sources import Source, open_source
from forerun.data.tokens.recipe import is_validation
from forerun.errors import UserError
from forerun.reporter import SILENT, Reporter
from forerun.units import MIB

HELD_OUT = 0.02  # share of the text if the job holds out no documents
BLOCK_CHARACTERS = 4096  # a longer text is held out in blocks, because it may be the only document
PIECE_BYTES = 64 * MIB


@dataclass
class SourceTexts:
    """The texts of all parts of a data section.

    Attributes:
      sources: the files of each part.
      data: the data section. Its `validation` is the share that is held out; if it is 0, a share of 2 % is.
      skipped: the number of bad rows that the last iteration skipped, as `data.bad_rows` allows.
    """

    sources: tuple[Source, ...]
    data: Data
    skipped: int = field(default=0, init=False)

    @property
    def total_bytes(self) -> int:
        """The stored size of all files in bytes."""
        return sum(source.size_bytes for source in self.sources)

    def texts(self, reporter: Reporter = SILENT) -> Iterator[tuple[str, bool]]:
        """Yield each text, and whether it is held out. Long texts are yielded in blocks of complete lines.

        Raises:
          UserError: a row cannot be used, and `data.bad_rows` does not allow to skip it.
        """
        before = rows = shown = 0
        self.skipped = 0
        with reporter.progress("MiB of text", -(-self.total_bytes // MIB)) as progress:
            for source in self.sources:
                pieces, size = source.pieces(PIECE_BYTES), source.size_bytes
                for number, piece in enumerate(pieces):
                    done, end = before + size * number // len(pieces), before + size * (number + 1) // len(pieces)
                    for row in source.rows(piece):
                        rows += 1
                        if isinstance(row, BadRow):
                            self._skip(row)
                            continue
                        for text, held in self._blocks(row.values):
                            yield text, held
                            # An estimate: a file has more bytes than characters, unless it is compressed.
                            done = min(end, done + len(text))
                            if done // MIB > shown and done < self.total_bytes:
                                shown = done // MIB
                                progress.update(shown)
                before += size
            progress.update(-(-self.total_bytes // MIB))
        if self.data.bad_rows < 1 and self.skipped > self.data.bad_rows * rows:
            raise UserError(
                "E-DATA-142",
                f"{self.skipped} of {rows} rows are bad, and data.bad_rows allows {self.data.bad_rows:g}",
                why="a tokenizer would be trained on other text than the model",
                fix="correct the rows, or raise data.bad_rows",
            )

    def _blocks(self, values: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        by_documents = self.data.validation > 0 and self.data.validation_by == "documents"
        share = self.data.validation or HELD_OUT
        held = is_validation(dict(values), share)
        for text in _strings(values):
            if by_documents or len(text) <= BLOCK_CHARACTERS:
                yield text, held
            else:
                yield from ((block, is_validation({"text": block}, share)) for block in blocks(text))

    def _skip(self, row: BadRow) -> None:
        """Count a bad row. Raise its error if too many of them were found."""
        self.skipped += 1
        allowed = self.data.bad_rows
        if row.whole_file or not allowed or (allowed >= 1 and self.skipped > allowed):
            raise row.error()


def open_texts(data: Data) -> SourceTexts:
    """Return the texts of a data section.

    Raises:
      UserError: the files do not exist, have an unknown form, or contain token ids.
    """
    sources = tuple(open_source(part) for part in data.parts.values())
    for source in sources:
        if source.form == "input_ids":
            raise UserError(
                "E-DATA-141",
                f"{source.files[0].name}: token ids have no text",
                why="a tokenizer is trained and measured on text",
                fix="name files with text, conversations, or prompts and completions",
            )
    return SourceTexts(sources, data)


def blocks(text: str) -> Iterator[str]:
    """Yield a long text as blocks. A block ends after a line or before a space, unless there is none near the limit."""
    start = 0
    while len(text) - start > BLOCK_CHARACTERS:
        near = start + BLOCK_CHARACTERS, start + 2 * BLOCK_CHARACTERS
        line, space = text.find("\n", *near), text.find(" ", *near)
        stop = line + 1 if line >= 0 else space if space >= 0 else near[0]
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _strings(value: object) -> Iterator[str]:
    """Yield the texts of a row: strings, the items of lists, and the content of messages."""
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, Mapping):
        known = [key for key in ("content", "text") if key in value]
        is_message = "role" in value or "type" in value
        yield from (text for key in (known if is_message else value) for text in _strings(value[key]))
    elif isinstance(value, Sequence):
        yield from (text for item in value for text in _strings(item))
