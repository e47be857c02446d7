"""What there is to see of a job's data, as plain values: whoever opens the corpus fills in a `Look`.

The terminal and the page draw a `Look` and read nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.data.shares import HeldOut
from forerun.program.derive import epochs_of, steps_per_epoch

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class SourceLook:
    """One source of the mixture."""

    name: str
    recognised: str  # "3 files, jsonl, column text"
    files: int
    size_bytes: int
    documents: int
    tokens: int
    share: float | None = None  # of the rows of an epoch, 0 .. 1
    passes: float | None = None  # how often an epoch sees each of its documents


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the documents looked at; `documents` is how many there are in all."""

    values: NDArray[np.int64]
    documents: int

    @property
    def sampled(self) -> bool:
        return len(self.values) < self.documents

    def percentile(self, percent: int) -> int:
        """The least length that `percent` of the documents do not exceed."""
        return int(np.percentile(self.values, percent, method="inverted_cdf")) if len(self.values) else 0

    @property
    def longest(self) -> int:
        return int(self.values.max(initial=0))

    def longer_share(self, sequence: int) -> float:
        """A row holds one token more than its positions: the last is a target only."""
        return float(np.mean(self.values > sequence + 1)) if len(self.values) else 0.0


@dataclass(frozen=True)
class ExaminedRows:
    """What a bounded number of packed rows hold; `rows` of them were taken."""

    rows: int
    positions: int
    padding: int
    learned: int  # positions with a weight
    unlearned_rows: int  # rows without any


@dataclass(frozen=True)
class ExaminedDocuments:
    """What was found in a bounded number of documents."""

    documents: int
    unlearned: int = 0  # no token of theirs is learned
    endless: int = 0  # the last token is not the end
    doubled_start: int = 0  # two equal special tokens in front
    start: str = ""  # that token
    repeated: int = 0  # documents that an earlier one equals
    most_often: tuple[int, str] = (1, "")  # the commonest text, how often, and how it begins
    spelled_out: int = 0  # special tokens that stand in the text as ordinary letters
    spelled: str = ""  # the first of them
    unknown_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """One token, or the few that make one character together. `text` is exact, `shown` has every sign visible."""

    ids: tuple[int, ...]
    text: str
    shown: str
    position: int  # of the first of them, in its segment
    learned: bool = False
    special: bool = False


@dataclass(frozen=True)
class Segment:
    """A document in a row, or the part of one; attention does not leave it.

    `target` is the learned token behind the last one: it is predicted, and never read in this row.
    """

    number: int
    pieces: tuple[Piece, ...]
    target: Piece | None = None

    @property
    def tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def learned(self) -> int:
        """Tokens that it teaches."""
        return sum(len(piece.ids) for piece in self.pieces if piece.learned) + (self.target is not None)

    @property
    def positions(self) -> tuple[int, int]:
        first = self.pieces[0].position
        return first, first + self.tokens - 1


@dataclass(frozen=True)
class Sample:
    """One row."""

    row: int
    segments: tuple[Segment, ...]
    padding: int

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def learned(self) -> int:
        return sum(segment.learned for segment in self.segments)


@dataclass(frozen=True)
class Skipped:
    place: str  # "stories/2.jsonl, line 7"
    reason: str


@dataclass(frozen=True)
class Look:
    """Everything that is shown. Shares are 0 .. 1; what is not known is None."""

    title: str
    sources: Sequence[SourceLook]
    form: str  # "text", "messages", "prompt/completion", "input_ids"
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
    too_long_policy: str = "split"  # as data.too_long; without meaning when concatenated
    steps: int | None = None  # of the job
    held_out: Sequence[HeldOut] = ()  # of each part, if the job asks for validation
    skipped: int = 0  # bad rows passed over
    skipped_first: Sequence[Skipped] = field(default=())

    @property
    def whole(self) -> bool:
        """Whether documents stay whole, in some part at least."""
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
        """Of the tokens in the rows examined, those that are a target with a weight."""
        seen = self.rows_examined
        return seen.learned / max(1, seen.positions - seen.padding) if seen else None

    @property
    def steps_per_epoch(self) -> float:
        return steps_per_epoch(self.rows, self.batch)

    @property
    def epochs(self) -> float | None:
        """The epochs of the job's steps; None if the steps follow from the epochs, or there are no rows."""
        return epochs_of(self.steps, self.rows, self.batch) if self.steps and self.rows else None
