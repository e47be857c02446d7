"""The host side of generation: the tokens of several prompts, and their texts with stop texts.

It tracks which rows are done, and reads tokens one step behind the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forerun.errors import UserError
from forerun.generate.engine import Chooser, DevicePlace, Engine, Settings
from forerun.generate.sampling import NOT_A_NUMBER

ROOM = 256  # free cache slots after the longest prompt, so that the cache does not grow for short answers

Finish = Literal["eos", "length", "stopped"]


class NotFinite(UserError):
    """An error for logits that are NaN or infinite, so that no next token can be chosen."""


class Stream:
    """An iterator over the new tokens of several prompts: one token per row and step, None for a row that is done.

    While the caller processes the tokens of a step, the devices already compute the next one. A row is done after:

    - an id of `engine.eos`, which is not returned,
    - `max_tokens` tokens,
    - the last position of the model, or
    - a call of `stop(row)`.

    Args:
        engine: The model.
        prompts: The tokens of each prompt.
        settings: The settings of the generation.
        first_row: The number of the first prompt in a longer list. The random numbers of a row depend on its number.

    Raises:
        UserError: A prompt is empty, too long, or has ids outside the vocabulary.
        NotFinite: The logits of a row are not finite (while iterating).
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings, *, first_row: int = 0
    ) -> None:
        for row, prompt in enumerate(prompts):
            engine.check(
                prompt, "the prompt" if len(prompts) == 1 and not first_row else f"prompt {first_row + row + 1}"
            )
        self._engine, self._settings = engine, settings
        self._rows = len(prompts)
        padding = engine.rows(self._rows) - self._rows
        self._sequences = [list(prompt) for prompt in prompts] + [[0]] * padding
        lengths = np.asarray([len(sequence) for sequence in self._sequences], np.int64)
        budget = np.full(len(lengths), settings.max_tokens, np.int64)
        if engine.positions is not None:
            budget = np.minimum(budget, engine.positions - lengths + 1)
        self._prompt_lengths, self._budget = lengths, budget
        self._alive = np.arange(len(lengths)) < self._rows
        numbers = (first_row + np.arange(len(lengths))).astype(np.uint32)
        self._chooser = Chooser(engine, settings, numbers)
        self._sent, self._sent_B = self._alive.copy(), engine.put(self._alive.copy())
        self.finish: list[Finish | None] = [None] * self._rows
        self._steps = self._run()

    def __iter__(self) -> Iterator[list[int | None]]:
        return self

    def __next__(self) -> list[int | None]:
        return next(self._steps)

    def stop(self, row: int) -> None:
        """Stop the generation of this row."""
        self._end(row, "stopped")

    def _end(self, row: int, why: Finish) -> None:
        if self._alive[row]:
            self._alive[row], self.finish[row] = False, why

    def _run(self) -> Iterator[list[int | None]]:
        if not self._rows:
            return
        room = min(self._settings.max_tokens, ROOM)
        place = self._engine.begin(self._sequences, room, self._chooser)
        given = 0
        while True:
            ahead = self._ahead(place, given)
            yield self._accepted(np.asarray(place.tokens_B), given)
            given += 1
            if not self._alive.any():
                return
            place = ahead or self._engine.begin(self._sequences, room, self._chooser)

    def _ahead(self, place: DevicePlace, given: int) -> DevicePlace | None:
        """Start the next step before the tokens of this one are read, and return its state.

        Return None if no row continues, or if the next step needs the tokens of this one on the host.
        """
        going_on = self._alive & (given + 1 < self._budget)
        if not going_on.any():
            return None
        places = self._prompt_lengths + given
        if self._engine.switch is not None and (places[going_on] == self._engine.switch).any():
            return None  # LongRope rotates all keys of such a row differently from here on: read it again
        if not np.array_equal(going_on, self._sent):
            self._sent, self._sent_B = going_on, self._engine.put(going_on)
        return self._engine.advance(place, int(places[going_on].max()), self._sent_B, self._chooser)

    def _accepted(self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], given: int) -> list[int | None]:
        """Record the tokens of a step, and return them, with None for a row that is done."""
        out: list[int | None] = [None] * self._rows
        for row in np.flatnonzero(self._alive).tolist():
            token = int(tokens[row])
            if token == NOT_A_NUMBER:
                raise NotFinite(
                    "E-GENERATE-008",
                    "the model's logits are not finite",
                    why=f"row {row + 1}, after {given} tokens: its weights hold NaN or infinity, or overflow the dtype",
                    fix="try --dtype float32; if the error remains, the checkpoint itself is broken",
                )
            if token in self._engine.eos:
                self._end(row, "eos")
                continue
            out[row] = token
            self._sequences[row].append(token)
            if given + 1 >= self._budget[row]:
                self._end(row, "length")
        return out


# ---- Texts ----


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
