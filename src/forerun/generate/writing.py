"""Generation of text from prompts, with stop texts and the reason why each answer ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.generate.engine import Engine, Settings
from forerun.generate.stream import Stream

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes an incomplete character to this
CONTEXT = 4  # earlier tokens that are decoded too, so that the tokenizer keeps the space before a word


@dataclass
class Answer:
    """The answer to a prompt so far."""

    text: str = ""
    tokens: int = 0  # number of generated tokens
    finish: Literal["eos", "stop", "length"] | None = None  # ended by the model, a stop text or a limit; None: not yet


class TextGeneration:
    """An iterable over (row, piece of text). `answers` has the complete text so far.

    Args:
        engine: The model.
        prompts: The tokens of each prompt.
        settings: The settings of the generation.
        decode: A function from ids to text.
        stop: Texts that end any row.
        row_stops: Additional texts that end one row, a list for each prompt.
        first_row: The number of the first prompt in a longer list, for its random numbers.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        *,
        row_stops: Sequence[Sequence[str]] | None = None,
        first_row: int = 0,
    ) -> None:
        self.answers = [Answer() for _ in prompts]
        own = row_stops if row_stops is not None else [()] * len(prompts)
        both = zip(prompts, own, strict=True)
        self._texts = [TextStream(decode, [*stop, *more], prompt) for prompt, more in both]
        self._stream = Stream(engine, prompts, settings, first_row=first_row)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for tokens in self._stream:
            for row, token in enumerate(tokens):
                piece = self._took(row, token)
                if piece:
                    self.answers[row].text += piece
                    yield row, piece

    def _took(self, row: int, token: int | None) -> str:
        """Process the token of a row, and return its new text."""
        answer, text = self.answers[row], self._texts[row]
        if answer.finish is not None:
            return ""
        piece = ""
        if token is not None:
            answer.tokens += 1
            piece = text.push(token)
        if text.stopped:
            self._stream.stop(row)
        elif self._stream.finish[row] is not None:
            piece += text.finish()
        if text.stopped:
            answer.finish = "stop"
        elif (ended := self._stream.finish[row]) is not None:
            answer.finish = "eos" if ended == "eos" else "length"
        return piece


class TextStream:
    """The text of one row, decoded token by token. Text is returned only when later tokens cannot change it.

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
