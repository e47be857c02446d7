"""Generation of text from prompts, with stop texts and the reason why each answer ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.generate.engine import Engine, Settings
from forerun.generate.stream import Stream
from forerun.generate.text import TextStream


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
