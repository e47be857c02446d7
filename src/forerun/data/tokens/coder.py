"""Texts to ids, as documents need them: special tokens of a text as plain text, those of a template as ids.

`plain` never gives the id of a special token. `written` recognises all of them, except those that stand at the given
forged places: for these there is a second tokenizer, the same in everything but the names of its special tokens, which
are single characters for private use. The true ones are renamed in the text, the forged ones are not, so one pass
through one pipeline gives both, whatever the tokenizer does at the beginning of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forerun.data.tokenizer_file import read_content
from forerun.data.tokens.memory import limited_memory
from forerun.data.tokens.recipe import BYTES

Ids = NDArray[np.int32]
Spans = NDArray[np.int64]  # [tokens, 2], first character and the one behind the last

NAMES_FROM = 0xF0000  # private use; the special tokens' names in the second tokenizer
SPOILER = "\U000ffffd"  # private use; stands inside a forged special token while a template is at work


class Coder(Protocol):
    @property
    def specials(self) -> list[str]:
        """The texts of the special tokens."""

    @property
    def private(self) -> re.Pattern[str]:
        """Characters that a text with forged special tokens must not have."""

    def plain(self, texts: Sequence[str]) -> list[Ids]:
        """Special tokens are plain text."""

    def continued(self, texts: Sequence[str]) -> list[Ids]:
        """As `plain`, for texts that go on from another one: no mark of a beginning in front."""

    def marked(self, texts: Sequence[str]) -> list[Ids]:
        """Special tokens are recognised."""

    def written(self, texts: Sequence[str]) -> list[tuple[Ids, Spans]]:
        """Special tokens are recognised, except those with a SPOILER inside; it is not counted in the spans."""

    def forged(self, ids: Ids) -> bool:
        """Whether there is a special token among `ids`."""


def open_coder(tokenizer: str) -> Coder:
    """'bytes', or the path of a tokenizer.json."""
    return ByteCoder() if tokenizer == BYTES else FileCoder(read_content(Path(tokenizer)))


class ByteCoder:
    """UTF-8: nothing is special in it."""

    specials: list[str] = []  # noqa: RUF012
    private = re.compile(SPOILER)

    def plain(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.int32) for text in texts]

    continued = marked = plain

    def written(self, texts: Sequence[str]) -> list[tuple[Ids, Spans]]:
        found = []
        for ids in self.plain(texts):
            place = np.cumsum((ids & 0xC0) != 0x80) - 1  # a continuation byte belongs to the character before
            found.append((ids, np.stack([place, place + 1], axis=1)))
        return found

    def forged(self, ids: Ids) -> bool:
        return False


class FileCoder:
    """A tokenizer.json, by its bytes."""

    def __init__(self, raw: bytes) -> None:
        import tokenizers

        self._raw = raw
        self._inner = _bare(tokenizers.Tokenizer.from_buffer(raw))
        added = self._inner.get_added_tokens_decoder()
        self._ids = {token.content: number for number, token in sorted(added.items()) if token.special}
        self.specials = list(self._ids)
        keeping = (number for number, name in enumerate(self._ids) if not added[self._ids[name]].rstrip)
        self._before = next(keeping, None)  # a special token that takes no space away behind it
        self._table = np.zeros(1 + max(self._inner.get_vocab(with_added_tokens=True).values()), np.bool_)
        self._table[list(self._ids.values())] = True
        self.private = re.compile(f"[{chr(NAMES_FROM)}-{chr(NAMES_FROM + len(self._ids))}{SPOILER}]")

    def plain(self, texts: Sequence[str]) -> list[Ids]:
        self._inner.encode_special_tokens = True
        return self._encoded(texts)

    def marked(self, texts: Sequence[str]) -> list[Ids]:
        self._inner.encode_special_tokens = False
        return self._encoded(texts)

    def continued(self, texts: Sequence[str]) -> list[Ids]:
        private = any(self.private.search(text) for text in texts)
        if not self._begins_differently or self._before is None or private:
            return self.plain(texts)
        first = chr(NAMES_FROM + self._before)
        inner = self._renamed
        with limited_memory(_characters(texts)):
            found = inner.encode_batch_fast([first + text for text in texts], add_special_tokens=False)
            return [np.array(one.ids[1:], np.int32) for one in found]

    def written(self, texts: Sequence[str]) -> list[tuple[Ids, Spans]]:
        if any(SPOILER in text for text in texts):
            _ = self._renamed, self._true_ids  # made before memory is limited
        with limited_memory(_characters(texts)):
            found: list[tuple[Ids, Spans] | None] = [
                self._renamed_written(text) if SPOILER in text else None for text in texts
            ]
            self._inner.encode_special_tokens = False
            rest = self._inner.encode_batch(
                [text for text, done in zip(texts, found, strict=True) if done is None], add_special_tokens=False
            )
            usual = iter(rest)
            return [done if done is not None else _with_spans(next(usual)) for done in found]

    def forged(self, ids: Ids) -> bool:
        return bool(self._table[ids].any())

    def _encoded(self, texts: Sequence[str]) -> list[Ids]:
        with limited_memory(_characters(texts)):
            found = self._inner.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(one.ids, np.int32) for one in found]

    def _renamed_written(self, text: str) -> tuple[Ids, Spans]:
        names = {special: chr(NAMES_FROM + number) for number, special in enumerate(self._ids)}
        parts: list[str] = []
        origin: list[NDArray[np.int64]] = []  # for each character of the renamed text, where it begins in the clean one
        place = 0
        for part in re.split(f"({self._pattern.pattern}|{SPOILER})", text):
            if part == SPOILER:
                continue
            name = names.get(part)
            parts.append(name or part)
            origin.append(np.array([place]) if name else np.arange(place, place + len(part)))
            place += len(part)
        begins = np.concatenate([*origin, [place]])
        ids, spans = _with_spans(self._renamed.encode("".join(parts), add_special_tokens=False))
        own = np.array([self._true_ids.get(int(number), int(number)) for number in ids], np.int32)
        return own, begins[spans]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return special_pattern(self.specials)

    @cached_property
    def _renamed(self) -> Any:
        import tokenizers

        content = json.loads(self._raw)
        number = {special: count for count, special in enumerate(self._ids)}
        for token in content["added_tokens"]:
            if token["content"] in number:
                token["content"] = chr(NAMES_FROM + number[token["content"]])
        return _bare(tokenizers.Tokenizer.from_str(json.dumps(content | {"post_processor": None})))

    @cached_property
    def _true_ids(self) -> dict[int, int]:
        names = enumerate(self._ids.values())
        return {self._renamed.token_to_id(chr(NAMES_FROM + number)): true for number, true in names}

    @cached_property
    def _begins_differently(self) -> bool:
        """Metaspace puts a mark in front of the first word of a text only: a continuation must not have it."""
        return '"prepend_scheme":"first"' in json.dumps(json.loads(self._inner.to_str())["pre_tokenizer"]).replace(
            " ", ""
        )


def special_pattern(specials: Sequence[str]) -> re.Pattern[str]:
    """Any of the special tokens, the longest first; without any it matches nothing."""
    ordered = sorted(specials, key=len, reverse=True)
    return re.compile("|".join(re.escape(special) for special in ordered) or r"(?!)")


def _bare(inner: Any) -> Any:
    """Nothing is cut, filled up, or added, and spans are not trimmed."""
    inner.no_truncation()
    inner.no_padding()
    inner.post_processor = None
    return inner


def _with_spans(found: Any) -> tuple[Ids, Spans]:
    return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)


def _characters(texts: Sequence[str]) -> int:
    return sum(map(len, texts))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8")
