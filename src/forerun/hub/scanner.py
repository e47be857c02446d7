"""A strict reader of the JSON that checkpoints carry, which builds only what its caller asks for.

`json.loads` makes objects of twenty times the text before anybody has looked at it; here every string, number and
count has a limit that is checked first.
"""

from __future__ import annotations

import json
import re

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_WHOLE = re.compile(rb"(?:0|[1-9][0-9]{0,18})(?![0-9.eE])")
_SCALAR = re.compile(rb"(?:true|false|null|-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,4})?)(?![0-9.eE])")
_WHOLES = re.compile(
    rb"\[S(?:NS(?:,SNS){0,7}+)?\]".replace(b"S", rb"[ \t\r\n]*+").replace(b"N", rb"(?:0|[1-9][0-9]{0,18}+)")
)
_SNIPPET = 24


class FaultError(Exception):
    """What is wrong with a text, without its file's name."""


class Scanner:
    """A position in a JSON text; every method reads one thing and moves on."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def next_is(self, character: bytes) -> bool:
        """Whether `character` comes next; it is taken if so."""
        if not self.raw.startswith(character, self.at):
            self._skip()
            if not self.raw.startswith(character, self.at):
                return False
        self.at += 1
        return True

    def expect(self, character: bytes, inside: str) -> None:
        if not self.next_is(character):
            raise self.unexpected(f"'{character.decode()}'", inside)

    def more(self, close: bytes, first: bool, inside: str) -> bool:
        """In a list or an object: whether another member follows; takes the comma or the closing bracket."""
        if self.next_is(close):
            return False
        if not first:
            self.expect(b",", inside)
        return True

    def string(self, inside: str, limit_bytes: int) -> str:
        """A string of at most `limit_bytes` of text."""
        self._skip()
        found = _STRING.match(self.raw, self.at, self.at + limit_bytes + 2)
        if found is None:
            if self.raw[self.at : self.at + 1] == b'"' and len(self.raw) - self.at > limit_bytes + 2:
                raise FaultError(f"{inside} is longer than {limit_bytes} bytes, or is not closed")
            raise self.unexpected("a string in double quotes", inside)
        self.at = found.end()
        try:
            if b"\\" not in found[0]:
                return found[0][1:-1].decode("utf-8")
            text = str(json.loads(found[0]))
            text.encode("utf-8")  # half of a surrogate pair is no text
        except ValueError:
            raise FaultError(f"{inside} is not UTF-8 text") from None
        return text

    def whole_number(self, inside: str) -> int:
        """An integer from 0 to 19 digits: no sign, no fraction, no boolean."""
        self._skip()
        found = _WHOLE.match(self.raw, self.at)
        if found is None:
            raise self.unexpected("a whole number of at most 19 digits", inside)
        self.at = found.end()
        return int(found[0])

    def whole_numbers(self, inside: str, limit: int) -> tuple[int, ...]:
        """A list of at most `limit` whole numbers."""
        short = _WHOLES.match(self.raw, self.at)
        if short is not None:
            parts = short[0][1:-1].split(b",") if short[0][1:-1].strip() else []
            if len(parts) <= limit:
                self.at = short.end()
                return tuple(map(int, parts))
        self.expect(b"[", inside)
        numbers: list[int] = []
        while self.more(b"]", not numbers, inside):
            if len(numbers) == limit:
                raise FaultError(f"{inside} has more than {limit} numbers")
            numbers.append(self.whole_number(inside))
        return tuple(numbers)

    def skip_scalar(self, inside: str, limit_bytes: int) -> None:
        """Pass over a number, string, true, false or null."""
        self._skip()
        if self.raw[self.at : self.at + 1] == b'"':
            self.string(inside, limit_bytes)
            return
        found = _SCALAR.match(self.raw, self.at)
        if found is None:
            raise self.unexpected("a number or a string", inside)
        self.at = found.end()

    def end(self, inside: str) -> None:
        self._skip()
        if self.at != len(self.raw):
            raise self.unexpected("nothing more", inside)

    def unexpected(self, wanted: str, inside: str) -> FaultError:
        snippet = self.raw[self.at : self.at + _SNIPPET]
        found = ascii(snippet.decode("latin-1")) if snippet else "the end"
        return FaultError(f"not valid JSON: {inside} needs {wanted} at byte {self.at}, found {found}")

    def _skip(self) -> None:
        found = _SPACE.match(self.raw, self.at)
        self.at = found.end() if found else self.at
