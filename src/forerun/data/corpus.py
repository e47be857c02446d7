"""Opening the job's data: files, tokenizer and rows in one call, with the counts a user wants to see."""

from __future__ import annotations

from pathlib import Path

from forerun.config.schema import Data
from forerun.data import text
from forerun.data.packing import Rows
from forerun.data.stream import token_stream
from forerun.data.tokenizer import Tokenizer
from forerun.units import Count


def open_text(data: Data, *, sequence: int, tokenizer: Tokenizer, cache: Path | None = None) -> Rows:
    """The rows of `data.path`, packed to `sequence`; tokenized once per content if there is a `cache` folder."""
    texts = [text.read(path) for path in text.documents(data.path)]
    return Rows(token_stream(texts, tokenizer, cache), sequence)


def counts(rows: Rows) -> str:
    """One line for the display: `12 documents  1.02M tokens  996 rows of 1024  0.0 % padding`."""
    many = "document" if rows.documents == 1 else "documents"
    return (
        f"{rows.documents} {many}  {Count(rows.tokens)} tokens  "
        f"{len(rows)} rows of {rows.sequence}  {rows.padding_share:.1%} padding"
    )
