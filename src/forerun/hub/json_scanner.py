"""A strict scanner for the JSON in checkpoints, which builds only the objects that its caller asks for.

The objects of `json.loads` can take twenty times the memory of the text, before any check is possible. Here every
string, number and count has a limit that is checked first.
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
    """An error in a text. The caller adds the name of the file."""


class Scanner:
    """A position in a JSON text. Every method reads one item and advances the position.

    The argument `inside` names the item in errors.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def next_is(self, character: bytes) -> bool:
        """Return whether `character` comes next, after white space. If so, skip it."""
        if not self.raw.startswith(character, self.at):
            self._skip()
            if not self.raw.startswith(character, self.at):
                return False
        self.at += 1
        return True

    def expect(self, character: bytes, inside: str) -> None:
        """Skip `character`, or raise FaultError if another one comes next."""
        if not self.next_is(character):
            raise self.unexpected(f"'{character.decode()}'", inside)

    def more(self, close: bytes, first: bool, inside: str) -> bool:
        """Return whether another member of a list or object follows. Skip the comma or the closing bracket."""
        if self.next_is(close):
            return False
        if not first:
            self.expect(b",", inside)
        return True

    def string(self, inside: str, limit_bytes: int) -> str:
        """Return a string of at most `limit_bytes` bytes, without its quotes and escapes."""
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
            text.encode("utf-8")  # raises for half of a surrogate pair
        except ValueError:
            raise FaultError(f"{inside} is not UTF-8 text") from None
        return text

    def whole_number(self, inside: str) -> int:
        """Return a non-negative integer of at most 19 digits, without sign, fraction or exponent."""
        self._skip()
        found = _WHOLE.match(self.raw, self.at)
        if found is None:
            raise self.unexpected("a whole number of at most 19 digits", inside)
        self.at = found.end()
        return int(found[0])

    def whole_numbers(self, inside: str, limit: int) -> tuple[int, ...]:
        """Return a list of at most `limit` non-negative integers."""
        # One regular expression reads a short list. This is faster than one call per number.
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
        """Skip a number, string, true, false or null."""
        self._skip()
        if self.raw[self.at : self.at + 1] == b'"':
            self.string(inside, limit_bytes)
            return
        found = _SCALAR.match(self.raw, self.at)
        if found is None:
            raise self.unexpected("a number or a string", inside)
        self.at = found.end()

    def end(self, inside: str) -> None:
        """Raise FaultError unless only white space follows."""
        self._skip()
        if self.at != len(self.raw):
            raise self.unexpected("nothing more", inside)

    def unexpected(self, wanted: str, inside: str) -> FaultError:
        """Return the error for text at this position that is not `wanted`."""
        snippet = self.raw[self.at : self.at + _SNIPPET]
        found = ascii(snippet.decode("latin-1")) if snippet else "the end"
        return FaultError(f"not valid JSON: {inside} needs {wanted} at byte {self.at}, found {found}")

    def _skip(self) -> None:
        found = _SPACE.match(self.raw, self.at)
        self.at = found.end() if found else self.at
