"""The report on a job's data, as plain values.

`forerun.data.inspect.open_corpus` creates a `CorpusReport` from an open corpus. The terminal and the page show it
and read nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.data.order.held_out import HeldOut
from forerun.hardware.object_storage import StorageReads

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class SourceSummary:
    """Figures of one source of the mixture."""

    name: str
    recognised: str  # "3 files, jsonl, column text"
    files: int
    size_bytes: int
    documents: int
    tokens: int
    share: float | None = None  # of the rows of an epoch, 0 .. 1
    passes: float | None = None  # how often an epoch contains each of its documents


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of all documents, or of a sample. `documents` is the number of all documents."""

    values: NDArray[np.int64]
    documents: int

    @property
    def sampled(self) -> bool:
        return len(self.values) < self.documents

    def percentile(self, percent: int) -> int:
        """Return the smallest length that `percent` of the documents do not exceed, or 0 without documents."""
        return int(np.percentile(self.values, percent, method="inverted_cdf")) if len(self.values) else 0

    @property
    def longest(self) -> int:
        return int(self.values.max(initial=0))

    def longer_share(self, sequence: int) -> float:
        """Return the share of documents that do not fit into a row of `sequence` positions.

        A row holds one token more than it has positions, because the last token is only a target.
        """
        return float(np.mean(self.values > sequence + 1)) if len(self.values) else 0.0


@dataclass(frozen=True)
class ExaminedRows:
    """Counts in a sample of `rows` packed rows."""

    rows: int
    positions: int
    padding: int
    learned: int  # positions with a weight in the loss
    unlearned_rows: int  # rows without such positions


@dataclass(frozen=True)
class ExaminedDocuments:
    """Counts in a sample of documents."""

    documents: int
    unlearned: int = 0  # documents without a token with a loss
    endless: int = 0  # documents without an end token
    doubled_start: int = 0  # documents that begin with the same special token twice
    start: str = ""  # that token
    repeated: int = 0  # documents that equal an earlier one
    most_often: tuple[int, str] = (1, "")  # how often the most frequent document occurs, and its beginning
    spelled_out: int = 0  # documents whose text contains a special token as plain text
    spelled: str = ""  # the first such token
    unknown_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class TokenPiece:
    """One token, or several tokens that form one character. `shown` is `text` with every character made visible."""

    ids: tuple[int, ...]
    text: str
    shown: str
    position: int  # of the first token, in its segment
    learned: bool = False  # has a loss
    special: bool = False


@dataclass(frozen=True)
class RowSegment:
    """A document in a row, or a part of one. Attention does not cross its borders.

    `target` is the token with a loss after the last one: the model predicts it, but does not read it in this row.
    """

    number: int
    pieces: tuple[TokenPiece, ...]
    target: TokenPiece | None = None

    @property
    def tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def learned(self) -> int:
        """The number of tokens with a loss."""
        return sum(len(piece.ids) for piece in self.pieces if piece.learned) + (self.target is not None)

    @property
    def positions(self) -> tuple[int, int]:
        """The first and the last position."""
        first = self.pieces[0].position
        return first, first + self.tokens - 1


@dataclass(frozen=True)
class Sample:
    """One row as the model sees it."""

    row: int
    segments: tuple[RowSegment, ...]
    padding: int

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def learned(self) -> int:
        return sum(segment.learned for segment in self.segments)


@dataclass(frozen=True)
class SkippedRows:
    """The place of a skipped row, and why it was skipped."""

    place: str  # "stories/2.jsonl, line 7"
    reason: str


@dataclass(frozen=True)
class CorpusReport:
    """The complete report on a job's data. Shares are 0 .. 1; None is unknown."""

    title: str
    sources: Sequence[SourceSummary]
    form: str  # "text", "messages", "prompt/completion", "alpaca", "input_ids"
    tokenizer: str
    vocabulary: int
    lengths: Lengths
    sequence: int
    packing: str  # "concatenate", "whole", or both in a mixture; "pairs"
    rows: int
    padding_share: float
    batch: int
    seed: int
    samples: Sequence[Sample] = ()
    rows_examined: ExaminedRows | None = None
    documents_examined: ExaminedDocuments | None = None
    too_long: int = 0  # documents that do not fit into a row
    too_long_policy: str = "split"  # as data.too_long; not used if documents are concatenated
    steps: int | None = None  # of the job
    held_out: Sequence[HeldOut] = ()  # of each part, if the job has validation
    skipped: int = 0  # bad rows
    skipped_first: Sequence[SkippedRows] = field(default=())
    rendering: Sequence[str] = ()  # how rows become text, for each kind of rendering: "with the model's chat template"
    unused: Sequence[str] = ()  # columns of the files that are not read
    storage: StorageReads | None = None  # requests to the bucket; None if the store is on this machine

    @property
    def whole(self) -> bool:
        """Whether at least one part packs complete documents or pairs."""
        return "whole" in self.packing or "pairs" in self.packing

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self.sources)

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def files(self) -> int:
        return sum(source.files for source in self.sources)

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)

    @property
    def learned_share(self) -> float | None:
        """The share of tokens with a loss in the examined rows, or None if no rows were examined."""
        seen = self.rows_examined
        return seen.learned / max(1, seen.positions - seen.padding) if seen else None

    @property
    def steps_per_epoch(self) -> float:
        """The steps per epoch. It may be a fraction, because batches continue across epochs."""
        return self.rows / self.batch

    @property
    def epochs(self) -> float | None:
        """The epochs of the job's steps, or None if the job sets no steps or there are no rows."""
        return self.steps * self.batch / self.rows if self.steps and self.rows else None
