"""Opening the job's data: files, tokenizer and rows in one call, with the counts a user wants to see."""

from __future__ import annotations

from pathlib import Path

from forerun.config.schema import Data
from forerun.data.packing import Rows
from forerun.data.sources import open_source
from forerun.data.stream import token_stream
from forerun.data.tokenizer import Tokenizer
from forerun.units import Count


def open_text(data: Data, *, sequence: int, tokenizer: Tokenizer, cache: Path | None = None) -> Rows:
    """The rows of `data.path`, packed to `sequence`; tokenized once per content if there is a `cache` folder."""
    source = open_source(data)
    recognised = "" if source.kind == "text" else source.recognised
    return Rows(token_stream(source.texts(), tokenizer, cache), sequence, recognised)


def counts(rows: Rows) -> str:
    """One line for the display: `12 documents  1.02M tokens  996 rows of 1024  0.0% padding`.

    Rows that do not come from plain text say first what they come from: `3 files, jsonl, column text`.
    """
    many = "document" if rows.documents == 1 else "documents"
    recognised = f"{rows.recognised}  " if rows.recognised else ""
    return (
        f"{recognised}{rows.documents} {many}  {Count(rows.tokens)} tokens  "
        f"{len(rows)} rows of {rows.sequence}  {rows.padding_share:.1%} padding"
    )
