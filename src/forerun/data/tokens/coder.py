"""Coders, which encode texts with a tokenizer.

Special tokens that a text contains become plain text. Special tokens that a chat template writes become ids. A text
that cannot be encoded has one of the problems below, to which the caller adds the place of the row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forerun.data.tokenizer import read_content
from forerun.data.tokens.memory import limited_memory
from forerun.data.tokens.protection import Ids, Protection, Spans, ids_and_spans, is_protected, without_extras
from forerun.data.tokens.recipe import BYTES
from forerun.errors import Problem

EMPTY = Problem(
    "E-DATA-106", "the text is empty", why="it gives no token", fix="remove the row, or allow it: data.bad_rows=1"
)
FORGED = Problem(
    "E-DATA-107",
    "the text contains a special token",
    why="this tokenizer cannot encode it as plain text",
    fix="remove it from the text, or allow it: data.special_tokens=true",
)
HALF = Problem(
    "E-DATA-108",
    "the text has half of a surrogate pair",
    why="it cannot be written as UTF-8",
    fix="write the data again with complete characters",
)
DEEP = Problem(
    "E-DATA-109",
    "it is nested too deeply",
    why="lists or objects have about a thousand levels",
    fix="remove the row",
)


def said(value: Any) -> str:
    """Return the repr of a value for a message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text contains half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


class ByteCoder:
    """The coder of UTF-8 bytes, which have no special tokens. Its methods are those of `FileCoder`."""

    def __init__(self) -> None:
        self.specials: list[str] = []
        self.protection = Protection({}, 0, bytes)

    def encode_plain(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    encode_continuations = encode_with_specials = encode_plain

    def encode_rendered(self, texts: Sequence[str]) -> list[tuple[Ids, Spans]]:
        found = []
        for ids in self.encode_plain(texts):
            place = np.cumsum((ids & 0xC0) != 0x80) - 1  # a continuation byte belongs to the character before it
            found.append((ids, np.stack([place, place + 1], axis=1)))
        return found


class FileCoder:
    """The coder of a tokenizer.json, given as bytes. It adds no tokens at the beginning or the end of a text."""

    def __init__(self, raw: bytes) -> None:
        import tokenizers

        self._inner = without_extras(tokenizers.Tokenizer.from_buffer(raw))
        added = self._inner.get_added_tokens_decoder()
        special_ids = {token.content: number for number, token in sorted(added.items()) if token.special}
        self.specials = list(special_ids)
        # A special token that does not remove the space after it.
        self._keeps_space = next((name for name, number in special_ids.items() if not added[number].rstrip), None)
        vocabulary = 1 + max(self._inner.get_vocab(with_added_tokens=True).values())
        self.protection = Protection(special_ids, vocabulary, lambda: raw)

    def encode_plain(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts, with special tokens as plain text."""
        return self._encode(texts, special_tokens=False)

    def encode_with_specials(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts, with special tokens as their ids."""
        return self._encode(texts, special_tokens=True)

    def encode_continuations(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts that continue another text: as `encode_plain`, but without a mark at the start."""
        if not self._begins_differently or self._keeps_space is None or self.protection.has_reserved(list(texts)):
            return self.encode_plain(texts)
        return self.protection.encode_after(self._keeps_space, texts)

    def encode_rendered(self, texts: Sequence[str]) -> list[tuple[Ids, Spans]]:
        """Return the ids and spans of rendered texts, with special tokens as their ids, except protected ones.

        Spans do not count the marks of the protection.
        """
        protected = {number: self.protection.encode(text) for number, text in enumerate(texts) if is_protected(text)}
        others = [text for text in texts if not is_protected(text)]
        with limited_memory(sum(map(len, others))):
            self._inner.encode_special_tokens = False
            found = iter(self._inner.encode_batch(others, add_special_tokens=False))
            return [protected[n] if n in protected else ids_and_spans(next(found)) for n in range(len(texts))]

    def _encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[Ids]:
        self._inner.encode_special_tokens = not special_tokens  # the library's name for "as plain text"
        with limited_memory(sum(map(len, texts))):
            found = self._inner.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(one.ids, np.int32) for one in found]

    @cached_property
    def _begins_differently(self) -> bool:
        """Whether the first word of a text gets a mark (Metaspace), which a continuation must not have."""
        return '"prepend_scheme":"first"' in json.dumps(json.loads(self._inner.to_str())["pre_tokenizer"]).replace(
            " ", ""
        )


Coder = ByteCoder | FileCoder


def open_coder(tokenizer: str) -> Coder:
    """Return the coder of 'bytes', or of the path of a tokenizer.json."""
    return ByteCoder() if tokenizer == BYTES else FileCoder(read_content(Path(tokenizer)))
