"""Protection against forged special tokens: a special token that is written out in a message stays plain text.

A chat template writes special tokens around the messages, and these must become single ids. The same characters inside
a message must not, or a user could end the turn of another role. Three steps distinguish them:

1. `Protection.protect` puts a mark inside each special token of the messages, so that the template and the tokenizer
   do not recognise it.
2. The chat template renders the messages.
3. `Protection.encode` removes the marks and encodes the text with a second tokenizer. It equals the first one except
   for the names of its special tokens, which are single characters for private use. The genuine special tokens are
   renamed in the text, the forged ones are not. One pass through one pipeline encodes both, so the tokens around them
   do not depend on what the tokenizer does at the beginning of a text.

Texts that are not messages are encoded without special tokens. `Protection.has_special` verifies the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.tokens.memory import limited_memory

Ids = NDArray[np.int32]
Spans = NDArray[np.int64]  # [tokens, 2]: the first character, and the one after the last

FIRST_NAME = 0xF0000  # private use: the names of the special tokens in the second tokenizer begin here
MARK = "\U000ffffd"  # private use: inside each forged special token while the template renders


class Protection:
    """The protection against forged special tokens of one tokenizer, which keeps them plain text.

    Args:
        specials: The special tokens, text to id.
        vocabulary: The number of ids of the tokenizer.
        read_content: Returns the bytes of its tokenizer.json. Called when a forged token is first encoded.
    """

    def __init__(self, specials: Mapping[str, int], vocabulary: int, read_content: Callable[[], bytes]) -> None:
        self._specials = dict(specials)
        self._read_content = read_content
        self.pattern = special_pattern(list(specials))
        # A message with one of these characters could forge the name of a special token, or a mark.
        self._reserved = re.compile(f"[{chr(FIRST_NAME)}-{chr(FIRST_NAME + len(specials))}{MARK}]")
        self._is_special = np.zeros(vocabulary, np.bool_)
        self._is_special[list(self._specials.values())] = True

    def protect(self, messages: Any) -> Any:
        """Return the messages with a mark inside each special token; the same object if they have none."""
        if not any_text(messages, self.pattern.search):
            return messages
        return _replace_texts(messages, lambda text: self.pattern.sub(_mark, text))

    def is_ambiguous(self, messages: Any, *, special_tokens: bool = False) -> bool:
        """Return whether messages that need protection have reserved characters, so that it would fail.

        With `special_tokens`, special tokens in messages are allowed and only marks need protection.
        """
        needed = not special_tokens and any_text(messages, self.pattern.search)
        needed = needed or any_text(messages, is_protected)
        return needed and self.has_reserved(messages)

    def has_reserved(self, value: Any) -> bool:
        """Return whether a text of `value` has a reserved character."""
        return any_text(value, self._reserved.search)

    def encode(self, text: str) -> tuple[Ids, Spans]:
        """Return the ids of a protected text, and the span of each token in the text without marks."""
        renamed, genuine = self._renamed, self._genuine_ids  # loaded before memory is limited
        names = {special: chr(FIRST_NAME + number) for number, special in enumerate(self._specials)}
        parts: list[str] = []
        # For each character of the renamed text: where it begins in the text without marks.
        origin: list[NDArray[np.int64]] = []
        place = 0
        with limited_memory(len(text)):
            for part in re.split(f"({self.pattern.pattern}|{MARK})", text):
                if part == MARK:
                    continue
                name = names.get(part)
                parts.append(name or part)
                origin.append(np.array([place]) if name else np.arange(place, place + len(part)))
                place += len(part)
            begins = np.concatenate([*origin, [place]])
            ids, spans = ids_and_spans(renamed.encode("".join(parts), add_special_tokens=False))
            return np.array([genuine.get(int(number), int(number)) for number in ids], np.int32), begins[spans]

    def encode_after(self, special: str, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts, each encoded after the special token `special`, whose id is not returned.

        The texts must have no reserved character. Special tokens in them are plain text.
        """
        renamed = self._renamed
        first = chr(FIRST_NAME + list(self._specials).index(special))
        with limited_memory(sum(map(len, texts))):
            found = renamed.encode_batch_fast([first + text for text in texts], add_special_tokens=False)
            return [np.array(one.ids[1:], np.int32) for one in found]

    def has_special(self, ids: Ids) -> bool:
        """Return whether a special token is among `ids`."""
        return bool(self._specials) and bool(self._is_special[ids].any())

    @cached_property
    def _renamed(self) -> Any:
        """The second tokenizer."""
        import tokenizers

        content = json.loads(self._read_content())
        number = {special: count for count, special in enumerate(self._specials)}
        for token in content["added_tokens"]:
            if token["content"] in number:
                token["content"] = chr(FIRST_NAME + number[token["content"]])
        return without_extras(tokenizers.Tokenizer.from_str(json.dumps(content | {"post_processor": None})))

    @cached_property
    def _genuine_ids(self) -> dict[int, int]:
        """Ids of the second tokenizer's special tokens to those of the first."""
        numbered = enumerate(self._specials.values())
        return {self._renamed.token_to_id(chr(FIRST_NAME + number)): genuine for number, genuine in numbered}


def special_pattern(specials: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of all special tokens, the longest first; without any it matches nothing."""
    ordered = sorted(specials, key=len, reverse=True)
    return re.compile("|".join(re.escape(special) for special in ordered) or r"(?!)")


def is_protected(text: str) -> bool:
    """Return whether `text` has a mark, so that only `Protection.encode` may encode it."""
    return MARK in text


def unmarked_flags(text: str, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `flags` (one for each character of `text`, and one for its end) without those of marks."""
    if not is_protected(text):
        return flags
    characters = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
    return flags[np.append(characters != ord(MARK), True)]


def any_text(value: Any, check: Callable[[str], object]) -> bool:
    """Return whether `check` holds for a string of `value`, keys included."""
    if isinstance(value, str):
        return bool(check(value))
    if isinstance(value, dict):
        return any(any_text(key, check) or any_text(inner, check) for key, inner in value.items())
    return isinstance(value, list) and any(any_text(inner, check) for inner in value)


def without_extras(tokenizer: Any) -> Any:
    """Return the tokenizer, changed to neither truncate, pad, add tokens nor trim spans."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    return tokenizer


def ids_and_spans(encoding: Any) -> tuple[Ids, Spans]:
    """Return the ids and the spans of an encoding of the tokenizers library."""
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def _mark(found: re.Match[str]) -> str:
    text = found.group()
    return text[:1] + MARK + text[1:]


def _replace_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_replace_texts(key, change): _replace_texts(inner, change) for key, inner in value.items()}
    return [_replace_texts(inner, change) for inner in value] if isinstance(value, list) else value
