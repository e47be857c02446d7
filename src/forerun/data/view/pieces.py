"""Token ids as pieces of text that join to the decoded text, and every sign of them made visible.

A character may be several tokens (bytes, or byte-level BPE): such tokens are one piece. Bytes that never become a
character are shown as ‹c3›. Terminal escapes, bidirectional marks and other invisible signs are spelled out, so that
a text can neither hide something nor take over the screen.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.data.tokenizer import ByteTokenizer, Tokenizer
from forerun.data.view.look import Piece

BYTE_END = "<|end|>"  # the bytes tokenizer's end has no name of its own
MOST_TOKENS_OF_A_CHARACTER = 4
LOST = "\ufffd"
SIGNS = {"\n": "⏎\n", "\t": "⇥\t"}
EMOJI_JOINER = "\u200d"
ODD_BLANKS = "\xa0\u2007\u202f\u3164"
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


class Spelling(Protocol):
    """How a tokenizer's ids are written."""

    def special(self, token: int) -> str | None:
        """The name of a special token; None for a plain one."""

    def texts(self, ids: Sequence[int], joins: Sequence[bool]) -> list[tuple[int, str, bytes | None]]:
        """(tokens, their text, their bytes if known), in order. Token n may share a piece with the one before it
        only where `joins[n]`."""


@dataclass(frozen=True)
class ByteSpelling:
    """For tokenizers whose plain tokens are bytes."""

    raw: Callable[[int], bytes]
    names: dict[int, str]

    def special(self, token: int) -> str | None:
        return self.names.get(token)

    def texts(self, ids: Sequence[int], joins: Sequence[bool]) -> list[tuple[int, str, bytes | None]]:
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
    """For every other tokenizer.json: the text that each further token adds to what is decoded."""

    decode: Callable[[list[int]], str]
    names: dict[int, str]

    def special(self, token: int) -> str | None:
        return self.names.get(token)

    def texts(self, ids: Sequence[int], joins: Sequence[bool]) -> list[tuple[int, str, bytes | None]]:
        found: list[tuple[int, str, bytes | None]] = []
        before = read = 0  # a token is decoded behind the piece before it, as its blank may depend on that
        for n in range(len(ids)):
            text = self.decode(list(ids[before : n + 1]))
            goes_on = n + 1 < len(ids) and joins[n + 1] and n + 1 - read < MOST_TOKENS_OF_A_CHARACTER
            if goes_on and text.endswith(LOST):
                continue
            found.append((n + 1 - read, text[len(self.decode(list(ids[before:read]))) :], None))
            before, read = read, n + 1
        return found


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    """How the ids of this tokenizer are written."""
    if isinstance(tokenizer, ByteTokenizer):
        return ByteSpelling(lambda token: bytes([token]), {tokenizer.eos: BYTE_END})
    inner: Any = tokenizer._inner  # type: ignore[attr-defined]
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


def pieces(
    ids: Sequence[int], spelling: Spelling, learned: Sequence[bool] | None = None, position: int = 0
) -> tuple[Piece, ...]:
    """The tokens of one segment, the first at `position`; those of one piece are all learned or all not."""
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
        Piece(tuple(int(token) for token in ids[at : at + count]), text, seen, position + at, marks[at], special[at])
        for (at, count, text, _), seen in zip(rows, shown, strict=True)
    )


def visible(text: str) -> str:
    """The text on its own, every sign visible."""
    return _visible([(text, None, False)])[0]


def _visible(parts: Sequence[tuple[str, bytes | None, bool]]) -> list[str]:
    """Each part made visible; blanks before a line's end, a special token or the end of all are dots."""
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
    """Visible text, and whether a blank in front of it would be at a line's end."""
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
    """Whether a character that has begun may go on with these bytes."""
    return bool(raw) and 0x80 <= raw[0] < 0xC0


def _unfinished(raw: bytes) -> bool:
    """Whether the last bytes are the beginning of a character."""
    for back in range(1, min(3, len(raw)) + 1):
        lead = raw[-back]
        if lead >= 0xC0:
            return back < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4 if lead < 0xF8 else 1)
        if lead < 0x80:
            return False
    return False


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes with: printable ones stand for themselves, the rest follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}
