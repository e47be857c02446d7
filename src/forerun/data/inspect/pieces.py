"""Pieces: the texts of tokens, with every character made visible. Together they are the decoded text.

A character may consist of several tokens (bytes, or byte-level BPE); these tokens are one piece. Bytes that do not
form a character are shown as ‹c3›. Terminal escapes, bidirectional marks and other invisible characters are spelled
out, so that a text can neither hide something nor control the terminal.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.data.inspect.corpus_report import RowSegment, Sample, TokenPiece
from forerun.data.tokenizer import ByteTokenizer, Tokenizer

BYTE_END = "<|end|>"  # name for the end token of the bytes tokenizer, which has none
MAX_TOKENS_OF_A_CHARACTER = 4
LOST = "\ufffd"
SIGNS = {"\n": "⏎\n", "\t": "⇥\t"}
EMOJI_JOINER = "\u200d"
ODD_BLANKS = "\xa0\u2007\u202f\u3164"
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@dataclass(frozen=True)
class ByteSpelling:
    """The spelling of tokenizers whose plain tokens are bytes."""

    raw: Callable[[int], bytes]
    names: dict[int, str]

    def special(self, token: int) -> str | None:
        """Return the name of a special token, or None for a plain token."""
        return self.names.get(token)

    def texts(self, ids: Sequence[int], joins: Sequence[bool]) -> list[tuple[int, str, bytes | None]]:
        """Return (number of tokens, their text, their bytes if known) for each piece, in order.

        Token n may be in the same piece as the token before it only if `joins[n]`.
        """
        found: list[tuple[int, str, bytes | None]] = []
        held, count = b"", 0
        for n, token in enumerate(ids):
            held += b"" if token in self.names else self.raw(token)
            count += 1
            if n + 1 < len(ids) and joins[n + 1] and _unfinished(held) and _continues(self.raw(ids[n + 1])):
                continue
            text = self.names.get(token) or held.decode("utf-8", errors="replace")
            found.append((count, text, held))
            held, count = b"", 0
        return found


@dataclass(frozen=True)
class DecodedSpelling:
    """The spelling of other tokenizers: the text of a token is what it adds to the decoded text before it."""

    decode: Callable[[list[int]], str]
    names: dict[int, str]

    def special(self, token: int) -> str | None:
        return self.names.get(token)

    def texts(self, ids: Sequence[int], joins: Sequence[bool]) -> list[tuple[int, str, bytes | None]]:
        found: list[tuple[int, str, bytes | None]] = []
        before = read = 0  # decode a token after the previous piece: its leading space may depend on it
        for n in range(len(ids)):
            text = self.decode(list(ids[before : n + 1]))
            may_continue = n + 1 < len(ids) and joins[n + 1] and n + 1 - read < MAX_TOKENS_OF_A_CHARACTER
            if may_continue and text.endswith(LOST):
                continue
            found.append((n + 1 - read, text[len(self.decode(list(ids[before:read]))) :], None))
            before, read = read, n + 1
        return found


Spelling = ByteSpelling | DecodedSpelling


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    """Return the spelling for a tokenizer."""
    if isinstance(tokenizer, ByteTokenizer):
        return ByteSpelling(_byte_of, {tokenizer.eos: BYTE_END})
    inner: Any = tokenizer._inner
    added = inner.get_added_tokens_decoder()
    names = {int(token): one.content for token, one in added.items() if one.special}
    if type(inner.decoder).__name__ == "ByteLevel":
        letters = _byte_letters()
        plain = {int(token): one.content for token, one in added.items()}

        def raw(token: int) -> bytes:
            if token in plain:
                return plain[token].encode()
            written: str = inner.id_to_token(token) or ""
            return b"".join(bytes([letters[one]]) if one in letters else one.encode() for one in written)

        return ByteSpelling(raw, names)
    return DecodedSpelling(lambda ids: inner.decode(ids, skip_special_tokens=False), names)


def _byte_of(token: int) -> bytes:
    """Return the byte of an id. Data with token ids may have ids beyond those of the bytes tokenizer."""
    return bytes([token]) if token < 256 else f"‹{token}›".encode()


def pieces(
    ids: Sequence[int], spelling: Spelling, learned: Sequence[bool] | None = None, position: int = 0
) -> tuple[TokenPiece, ...]:
    """Return the pieces of one segment, whose first token is at `position`.

    Either all tokens of a piece have a loss or none. Without `learned`, all tokens have a loss.
    """
    marks = list(learned) if learned is not None else [True] * len(ids)
    special = [spelling.special(token) is not None for token in ids]
    joins = [n > 0 and not special[n] and not special[n - 1] and marks[n] == marks[n - 1] for n in range(len(ids))]
    found = spelling.texts(ids, joins)
    rows, at = [], 0
    for count, text, raw in found:
        rows.append((at, count, text, raw))
        at += count
    shown = _visible([(text, raw, special[at]) for at, _, text, raw in rows])
    return tuple(
        TokenPiece(
            tuple(int(token) for token in ids[at : at + count]), text, seen, position + at, marks[at], special[at]
        )
        for (at, count, text, _), seen in zip(rows, shown, strict=True)
    )


def visible(text: str) -> str:
    """Return a text with every character made visible."""
    return _visible([(text, None, False)])[0]


def _visible(parts: Sequence[tuple[str, bytes | None, bool]]) -> list[str]:
    """Return each part with every character made visible.

    Spaces become dots at the end of a line, before a special token and at the end of the text.
    """
    shown: list[str] = []
    ends = True
    for text, raw, special in reversed(parts):
        if special:
            shown.append(_line(text, ends=False)[0])
            ends = True
        elif LOST in text and raw is not None and LOST.encode() not in raw:
            shown.append("‹" + raw.hex(" ") + "›")
            ends = False
        else:
            seen, ends = _line(text, ends)
            shown.append(seen)
    return shown[::-1]


def _line(text: str, ends: bool) -> tuple[str, bool]:
    """Return the visible text, and whether a space before it would be at the end of a line."""
    out = []
    for sign in reversed(text):
        if sign == " ":
            out.append("·" if ends else " ")
            continue
        out.append(_sign(sign))
        ends = sign in "\n\r"
    return "".join(reversed(out)), ends


def _sign(sign: str) -> str:
    if sign in SIGNS:
        return SIGNS[sign]
    hidden = unicodedata.category(sign) in INVISIBLE or sign in ODD_BLANKS
    return f"‹{ord(sign):02x}›" if hidden and sign != EMOJI_JOINER else sign


def _continues(raw: bytes) -> bool:
    """Return whether these bytes can continue an incomplete character."""
    return bool(raw) and 0x80 <= raw[0] < 0xC0


def _unfinished(raw: bytes) -> bool:
    """Return whether the bytes end with an incomplete character."""
    for back in range(1, min(3, len(raw)) + 1):
        lead = raw[-back]
        if lead >= 0xC0:
            return back < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4 if lead < 0xF8 else 1)
        if lead < 0x80:
            return False
    return False


def _byte_letters() -> dict[str, int]:
    """Return letter -> byte of byte-level BPE. Printable bytes are their own letters, the others follow chr(255)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


# ---- Excerpts of long rows: their beginning and end, and the number of tokens omitted in the middle ----


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
        [_piece_cost(piece) + (BORDER_COST if n == 0 else 0) for n, piece in enumerate(segment.pieces)]
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


def _piece_cost(piece: TokenPiece) -> int:
    return len(piece.shown) + LINE_COST * piece.shown.count("\n")
