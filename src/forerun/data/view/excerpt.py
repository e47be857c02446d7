"""A long row with its middle left out: the beginning and the end stay, and what is missing is counted."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.data.view.look import Piece, Sample, Segment

HEAD = 0.7  # of what is shown
LINE_COST, BORDER_COST = 40, 80  # in signs: a line end, a segment's border


@dataclass(frozen=True)
class Gap:
    """What is left out between two pieces; `segments` counts only those that are missing altogether."""

    tokens: int
    learned: int
    segments: int

    def text(self) -> str:
        whole = f", {self.segments} whole segment{'s' if self.segments > 1 else ''} among them" if self.segments else ""
        return f"{self.tokens:,} tokens left out, {self.learned:,} learned{whole}"


@dataclass(frozen=True)
class Part:
    """A segment, or what is shown of it; `begins` where its first pieces are among them."""

    segment: Segment
    pieces: tuple[Piece, ...]
    begins: bool = True


def excerpt(sample: Sample, signs: int | None) -> list[Part | Gap]:
    """About `signs` signs of the row; None: all of it."""
    costs = [
        [_cost(piece) + (BORDER_COST if n == 0 else 0) for n, piece in enumerate(segment.pieces)]
        for segment in sample.segments
    ]
    total = sum(map(sum, costs))
    if signs is None or total <= 1.2 * signs:
        return [Part(segment, segment.pieces) for segment in sample.segments]
    before: list[Part | Gap] = []
    after: list[Part | Gap] = []
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
            before.append(Part(segment, tuple(head)))
        if tail:
            after.append(Part(segment, tuple(tail), begins=len(tail) == len(segment.pieces)))
        segments += not head and not tail
    return [*before, *([Gap(tokens, learned, segments)] if tokens else []), *after]


def _cost(piece: Piece) -> int:
    return len(piece.shown) + LINE_COST * piece.shown.count("\n")
