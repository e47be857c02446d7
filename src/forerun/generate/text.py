"""Tokens to text as they come: nothing is shown that a later token could still change or take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of the first bytes of a character
CONTEXT = 4  # tokens before, so that a tokenizer keeps the space in front of a word


class TextStream:
    """The text of one row.

    Args:
      decode: ids to text.
      stop: texts that end the answer; they are not part of it.
      prompt: the ids before, of which the last give the first token its context.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._decode, self._stop = decode, tuple(text for text in stop if text)
        self._ids = list(prompt[-CONTEXT:])
        self._from, self._upto = 0, len(self._ids)  # the context, and the ids whose text is out
        self._held, self._over = "", False
        self.stopped = False  # by one of the stop texts

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        if self._over:
            return ""
        self._ids.append(token)
        shown, whole = self._decode(self._ids[self._from : self._upto]), self._decode(self._ids[self._from :])
        if whole.endswith(UNFINISHED) or len(whole) <= len(shown):
            return ""
        self._from, self._upto = max(self._from, self._upto - CONTEXT), len(self._ids)
        return self._released(whole[len(shown) :])

    def finish(self) -> str:
        """What was held back: no more tokens come."""
        if self._over:
            return ""
        shown, whole = self._decode(self._ids[self._from : self._upto]), self._decode(self._ids[self._from :])
        text = self._released(whole[len(shown) :]) + self._held
        self._held, self._over = "", True
        return text

    def _released(self, new: str) -> str:
        text = self._held + new
        if found := [place for stop in self._stop if (place := text.find(stop)) >= 0]:
            self._held, self._over, self.stopped = "", True, True
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How long an end of `text` is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
