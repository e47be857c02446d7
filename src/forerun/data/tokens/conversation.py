"""Conversations to tokens: written by the chat template, learned where the assistant speaks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.tokens.coder import SPOILER, Coder, Ids, Spans, special_pattern
from forerun.data.tokens.recipe import Recipe
from forerun.data.tokens.trouble import HALF, Trouble, is_half, said
from forerun.errors import UserError
from forerun.hub.chat import Spoken, Unspoken, spoken_all

Mask = NDArray[np.bool_]


class Conversations:
    """Encodes many conversations with one run of the template's process."""

    def __init__(self, coder: Coder, recipe: Recipe) -> None:
        if recipe.template is None:
            raise UserError(
                "the data is chat, and there is no chat template",
                why="neither the model's folder nor the job has one",
                fix="data.chat_template=chatml, or the path of a Jinja file",
            )
        self._template: str = recipe.template
        self._coder, self._recipe = coder, recipe
        self._specials = special_pattern(coder.specials)
        self._answers = recipe.loss_on == "answers"

    def encode(self, conversations: Sequence[Any]) -> list[tuple[Ids, Mask | None] | Trouble]:
        """Tokens and what of them is learned (None: all), or what is wrong, for each."""
        return self._encoded(self._spoken(conversations))

    def encode_pairs(
        self, ones: Sequence[Any], others: Sequence[Any]
    ) -> list[tuple[tuple[Ids, Mask | None] | Trouble, tuple[Ids, Mask | None] | Trouble]]:
        """As `encode`, for conversations with a common beginning, of which nothing is learned."""
        spoken = self._spoken([*ones, *others])
        for number in range(len(ones)):
            one, other = spoken[number], spoken[number + len(ones)]
            if isinstance(one, Spoken) and isinstance(other, Spoken):
                parted = common_length(one.text, other.text)
                spoken[number], spoken[number + len(ones)] = _after(one, parted), _after(other, parted)
        found = self._encoded(spoken)
        return list(zip(found[: len(ones)], found[len(ones) :], strict=True))

    def _spoken(self, conversations: Sequence[Any]) -> list[Spoken | Trouble]:
        found: list[Spoken | Trouble | None] = [self._trouble(one) for one in conversations]
        good = [number for number, trouble in enumerate(found) if trouble is None]
        if not good:
            return [one for one in found if one is not None]
        spoken = spoken_all(
            self._template,
            [self._spoiled(conversations[number]) for number in good],
            special=self._recipe.special,
            ends=self._coder.specials,
            answers=self._answers,
            origin=self._recipe.template_origin,
        )
        for number, one in zip(good, spoken, strict=True):
            found[number] = Trouble(one.what, one.why, one.fix) if isinstance(one, Unspoken) else one
        return [one for one in found if one is not None]

    def _encoded(self, spoken: Sequence[Spoken | Trouble]) -> list[tuple[Ids, Mask | None] | Trouble]:
        coded = iter(self._coder.written([one.text for one in spoken if isinstance(one, Spoken)]))
        return [one if isinstance(one, Trouble) else self._document(one, *next(coded)) for one in spoken]

    def _document(self, spoken: Spoken, ids: Ids, spans: Spans) -> tuple[Ids, Mask | None] | Trouble:
        end = np.array([self._recipe.eos], np.int32)
        text = spoken.text.rstrip()
        closed = bool(self._coder.specials) and text.endswith(tuple(self._coder.specials))
        tokens = ids if closed and len(ids) else np.concatenate([ids, end])
        if not self._answers:
            return tokens, None
        learned = _learned(spoken, spans)
        if not learned.any():
            return Trouble(
                "nothing in it is said by the assistant",
                why="so nothing of it would be learned",
                fix="take the row out, or learn all of it: data.loss_on=all",
            )
        if len(tokens) > len(ids):
            learned = np.append(learned, bool(spoken.spans and spoken.spans[-1][1] >= len(text)))
        return tokens, None if learned.all() else learned

    def _trouble(self, messages: Any) -> Trouble | None:
        if not isinstance(messages, list) or not messages:
            return Trouble("messages is not a list of messages", why=f"it is {said(messages)}", fix=FORM)
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return Trouble(f"message {number} has no role", why=f"it is {said(message)}", fix=FORM)
        forged = not self._recipe.special_tokens and any_text(messages, self._specials.search)
        spoiled = any_text(messages, lambda text: SPOILER in text)
        if (forged or spoiled) and any_text(messages, self._coder.private.search):
            return Trouble(
                "a special token stands in the text beside characters for private use",
                why=f"U+{ord(SPOILER):X} and its like are needed to tell the two apart",
                fix="take one of them out of the text",
            )
        return HALF if any_text(messages, is_half) else None

    def _spoiled(self, messages: Any) -> Any:
        return messages if self._recipe.special_tokens else spoil_messages(messages, self._specials)


FORM = 'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def as_messages(prompt: str, answer: str) -> list[dict[str, str]]:
    """Return a prompt and its answer as a conversation."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _learned(spoken: Spoken, spans: Spans) -> Mask:
    """A token is learned if one of its characters is said by the assistant. One without any goes with the next."""
    spoke = np.zeros(len(spoken.text) + 1, np.bool_)
    for start, stop in spoken.spans:
        spoke[start:stop] = True
    if SPOILER in spoken.text:
        characters = np.frombuffer(spoken.text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
        spoke = spoke[np.append(characters != ord(SPOILER), True)]
    before = np.concatenate([[0], np.cumsum(spoke)])
    starts, stops = spans[:, 0], spans[:, 1]
    return np.where(starts < stops, before[stops] > before[starts], spoke[starts])


def common_length(one: str, other: str) -> int:
    """Characters that both begin with."""
    different = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


def _after(spoken: Spoken, parted: int) -> Spoken:
    """Without what the assistant says before the conversations part; its last words are always its own."""
    *before, last = spoken.spans or (None,)
    spans = (*(span for span in before if span and span[1] > parted), last)
    return replace(spoken, spans=tuple(span for span in spans if span))


def spoil_messages(messages: Any, specials: re.Pattern[str]) -> Any:
    """Return the messages with a SPOILER inside each special token, so that no template and no tokenizer recognises it.

    Messages without any are returned as they are.
    """
    if not any_text(messages, specials.search):
        return messages
    return _replaced(messages, lambda text: specials.sub(_spoil, text))


def _spoil(found: Any) -> str:
    text: str = found.group()
    return text[:1] + SPOILER + text[1:]


def any_text(value: Any, check: Any) -> bool:
    """Return whether `check` holds for a string of `value`, keys included."""
    if isinstance(value, str):
        return bool(check(value))
    if isinstance(value, dict):
        return any(any_text(key, check) or any_text(inner, check) for key, inner in value.items())
    return isinstance(value, list) and any(any_text(inner, check) for inner in value)


def _replaced(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_replaced(key, change): _replaced(inner, change) for key, inner in value.items()}
    return [_replaced(inner, change) for inner in value] if isinstance(value, list) else value
