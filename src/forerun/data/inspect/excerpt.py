"""Excerpts of long rows: their beginning and end, and the number of tokens omitted in the middle."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.data.inspect.corpus_report import RowSegment, Sample, TokenPiece

HEAD = 0.7  # share of the beginning in the characters that are shown
LINE_COST, BORDER_COST = 40, 80  # characters that a line end and the border of a segment count as


@dataclass(frozen=True)
class Gap:
    """The omitted middle of a row. `segments` counts only segments that are omitted completely."""

    tokens: int
    learned: int  # tokens with a loss
    segments: int

    def text(self) -> str:
        whole = (
            f", including {self.segments} complete segment{'s' if self.segments > 1 else ''}" if self.segments else ""
        )
        return f"{self.tokens:,} tokens omitted, {self.learned:,} with loss{whole}"


@dataclass(frozen=True)
class ExcerptPart:
    """A segment, or the part of it that is shown. `begins` tells whether this includes its first piece."""

    segment: RowSegment
    pieces: tuple[TokenPiece, ...]
    begins: bool = True


def excerpt(sample: Sample, signs: int | None) -> list[ExcerptPart | Gap]:
    """Return about `signs` characters of the row, or the complete row for None."""
    costs = [
        [_cost(piece) + (BORDER_COST if n == 0 else 0) for n, piece in enumerate(segment.pieces)]
        for segment in sample.segments
    ]
    total = sum(map(sum, costs))
    if signs is None or total <= 1.2 * signs:
        return [ExcerptPart(segment, segment.pieces) for segment in sample.segments]
    before: list[ExcerptPart | Gap] = []
    after: list[ExcerptPart | Gap] = []
    tokens = learned = segments = spent = 0
    for segment, prices in zip(sample.segments, costs, strict=True):
        head, tail = [], []
        for n, (piece, price) in enumerate(zip(segment.pieces, prices, strict=True)):
            border = BORDER_COST if n == 0 else 0
            if spent < HEAD * signs:
                head.append(piece)
            elif total - spent - border <= (1 - HEAD) * signs:
                tail.append(piece)
            else:
                tokens += len(piece.ids)
                learned += len(piece.ids) * piece.learned
            spent += price
        if head:
            before.append(ExcerptPart(segment, tuple(head)))
        if tail:
            after.append(ExcerptPart(segment, tuple(tail), begins=len(tail) == len(segment.pieces)))
        segments += not head and not tail
    return [*before, *([Gap(tokens, learned, segments)] if tokens else []), *after]


def _cost(piece: TokenPiece) -> int:
    return len(piece.shown) + LINE_COST * piece.shown.count("\n")
