"""Incremental decoding of tokens to text. Text is returned only when later tokens cannot change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes an incomplete character to this
CONTEXT = 4  # earlier tokens that are decoded too, so that the tokenizer keeps the space before a word


class TextStream:
    """The text of one row.

    Args:
        decode: A function from ids to text.
        stop: Texts that end the answer. They are not part of it.
        prompt: The ids of the prompt. The last ones are the context of the first token.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._decode, self._stop = decode, tuple(text for text in stop if text)
        self._ids = list(prompt[-CONTEXT:])
        self._from, self._upto = 0, len(self._ids)  # start of the context, and end of the ids whose text was returned
        self._held, self._over = "", False  # text that may be the start of a stop text, and whether the row is done
        self.stopped = False  # whether a stop text ended the row

    def push(self, token: int) -> str:
        """Add a token, and return the new text that later tokens cannot change."""
        if self._over:
            return ""
        self._ids.append(token)
        shown, whole = self._decode(self._ids[self._from : self._upto]), self._decode(self._ids[self._from :])
        if whole.endswith(UNFINISHED) or len(whole) <= len(shown):
            return ""
        self._from, self._upto = max(self._from, self._upto - CONTEXT), len(self._ids)
        return self._released(whole[len(shown) :])

    def finish(self) -> str:
        """Return the remaining text. No tokens may follow."""
        if self._over:
            return ""
        shown, whole = self._decode(self._ids[self._from : self._upto]), self._decode(self._ids[self._from :])
        text = self._released(whole[len(shown) :]) + self._held
        self._held, self._over = "", True
        return text

    def _released(self, new: str) -> str:
        """Add new text, and return the part that cannot belong to a stop text."""
        text = self._held + new
        if found := [place for stop in self._stop if (place := text.find(stop)) >= 0]:
            self._held, self._over, self.stopped = "", True, True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
