"""Encoding of conversations: the chat template renders them, and by default only the assistant's text has a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.tokens.coder import HALF, Coder, has_lone_surrogate
from forerun.data.tokens.protection import MARK, Ids, Spans, any_text, unmarked_flags
from forerun.data.tokens.recipe import Recipe
from forerun.errors import Problem, UserError
from forerun.hub.chat.template import RenderedConversation, render_conversations

Mask = NDArray[np.bool_]
SYSTEM_ROLES = ("system", "developer")


class Conversations:
    """An encoder of batches of conversations. It renders a batch with one run of the template process."""

    def __init__(self, coder: Coder, recipe: Recipe) -> None:
        if recipe.template is None:
            raise UserError(
                "E-DATA-088",
                "the data is chat, and there is no chat template",
                why="neither the model's folder nor the job has one",
                fix="data.chat_template=chatml, or the path of a Jinja file",
            )
        self._template: str = recipe.template
        self._coder, self._recipe = coder, recipe
        self._answers = recipe.loss_on == "answers"

    def encode(
        self, conversations: Sequence[Any], prompts: Sequence[int] = (), tools: Sequence[Any] = ()
    ) -> list[tuple[Ids, Mask | None] | Problem]:
        """Return the tokens and the loss mask (None: all have a loss), or a problem, for each conversation.

        `prompts` are the numbers of messages at the start of each conversation that have no loss, by default 0.
        `tools` are the tools of each conversation, or None, by default none.
        """
        complete = [self._with_system(one) for one in conversations]
        tools = self._tools(tools, len(complete))
        spoken = self._render(complete, tools)
        if self._answers and any(prompts):
            spoken = self._without_prompts(spoken, complete, conversations, prompts, tools)
        return self._encoded(spoken)

    def encode_pairs(
        self, ones: Sequence[Any], others: Sequence[Any], tools: Sequence[Any] = ()
    ) -> list[tuple[tuple[Ids, Mask | None] | Problem, tuple[Ids, Mask | None] | Problem]]:
        """Return the results of `encode` for pairs of conversations.

        Turns of the assistant that end in the common beginning of a pair have no loss.
        """
        both = self._tools(tools, len(ones)) * 2
        spoken = self._render([self._with_system(one) for one in (*ones, *others)], both)
        for number in range(len(ones)):
            one, other = spoken[number], spoken[number + len(ones)]
            if isinstance(one, RenderedConversation) and isinstance(other, RenderedConversation):
                parted = common_length(one.text, other.text)
                spoken[number], spoken[number + len(ones)] = (
                    _without_common_spans(one, parted),
                    _without_common_spans(other, parted),
                )
        found = self._encoded(spoken)
        return list(zip(found[: len(ones)], found[len(ones) :], strict=True))

    def _with_system(self, messages: Any) -> Any:
        """Return the messages without ignored fields, after the job's system prompt unless they contain one."""
        ignored = self._recipe.ignored_fields
        if ignored:
            messages = [{key: held for key, held in one.items() if key not in ignored} for one in messages]
        if self._recipe.system is None or any(message.get("role") in SYSTEM_ROLES for message in messages):
            return messages
        return [{"role": "system", "content": self._recipe.system}, *messages]

    def _tools(self, tools: Sequence[Any], count: int) -> list[Any]:
        """Return the tools of each conversation, or None for each of them."""
        return list(tools) if tools and "tools" not in self._recipe.ignored_fields else [None] * count

    def _without_prompts(
        self,
        spoken: Sequence[RenderedConversation | Problem],
        complete: Sequence[Any],
        conversations: Sequence[Any],
        prompts: Sequence[int],
        tools: Sequence[Any],
    ) -> list[RenderedConversation | Problem]:
        """Return the conversations without the spans of answers in their prompts.

        A prompt is rendered alone to find where it ends. The text of the conversation must begin with it.
        """
        found = list(spoken)
        numbers: list[int] = []
        shortened: list[Any] = []
        for number, (messages, own, count) in enumerate(zip(complete, conversations, prompts, strict=True)):
            count += len(messages) - len(own)  # the job's system prompt
            answered = any(one["role"] == "assistant" for one in messages[:count])
            if answered and isinstance(found[number], RenderedConversation):
                numbers.append(number)
                shortened.append(self._protect(messages)[:count])
        given = [self._protect(tools[number]) for number in numbers]
        for number, prompt in zip(numbers, self._rendered(shortened, given, answers=False), strict=True):
            one = found[number]
            assert isinstance(one, RenderedConversation)
            if isinstance(prompt, Problem) or not one.text.startswith(prompt.text):
                found[number] = Problem(
                    "E-DATA-124",
                    "the end of the prompt cannot be determined",
                    why="the chat template writes the messages of the prompt differently if the completion follows",
                    fix="use one list of messages, whose answers all have a loss: data.columns.messages=NAME",
                )
            else:
                end = len(prompt.text)
                spans = tuple((max(start, end), stop) for start, stop in one.spans if stop > end)
                found[number] = replace(one, spans=spans)
        return found

    def _render(self, conversations: Sequence[Any], tools: Sequence[Any]) -> list[RenderedConversation | Problem]:
        """Return the rendered text and the spans of the assistant, or a problem, for each conversation."""
        found: list[RenderedConversation | Problem | None] = [
            self._problem([one, some]) for one, some in zip(conversations, tools, strict=True)
        ]
        good = [number for number, trouble in enumerate(found) if trouble is None]
        if not good:
            return [one for one in found if one is not None]
        protected = [self._protect(conversations[number]) for number in good]
        given = [self._protect(tools[number]) for number in good]
        spoken = self._rendered(protected, given, answers=self._answers, checks=True)
        for number, one in zip(good, spoken, strict=True):
            found[number] = one
        return [one for one in found if one is not None]

    def _rendered(
        self, protected: Sequence[Any], tools: Sequence[Any], *, answers: bool, checks: bool = False
    ) -> list[RenderedConversation | Problem]:
        if not protected:
            return []
        return render_conversations(
            self._template,
            protected,
            special=self._recipe.special,
            ends=self._coder.specials,
            tools=tools,
            answers=answers,
            checks=checks,
            origin=self._recipe.template_origin,
        )

    def _encoded(self, spoken: Sequence[RenderedConversation | Problem]) -> list[tuple[Ids, Mask | None] | Problem]:
        coded = iter(self._coder.encode_rendered([one.text for one in spoken if isinstance(one, RenderedConversation)]))
        return [one if isinstance(one, Problem) else self._document(one, *next(coded)) for one in spoken]

    def _document(self, spoken: RenderedConversation, ids: Ids, spans: Spans) -> tuple[Ids, Mask | None] | Problem:
        """Return the tokens and the loss mask of a conversation.

        An end token is added unless the template ends the text with a special token. It has a loss if the text ends
        with the assistant.
        """
        end = np.array([self._recipe.eos], np.int32)
        text = spoken.text.rstrip()
        closed = bool(self._coder.specials) and text.endswith(tuple(self._coder.specials))
        tokens = ids if closed and len(ids) else np.concatenate([ids, end])
        if not self._answers:
            return tokens, None
        learned = _loss_mask(spoken, spans)
        if not learned.any():
            return Problem(
                "E-DATA-089",
                "it has no text of the assistant",
                why="no token of it would have a loss",
                fix="remove the row, or train on all messages: data.loss_on=all",
            )
        if len(tokens) > len(ids):
            learned = np.append(learned, bool(spoken.spans and spoken.spans[-1][1] >= len(text)))
        return tokens, None if learned.all() else learned

    def _problem(self, messages: Any) -> Problem | None:
        """Return the problem of messages that cannot be encoded safely, or None."""
        if self._coder.protection.is_ambiguous(messages, special_tokens=self._recipe.special_tokens):
            return Problem(
                "E-DATA-092",
                "the text contains a special token and characters for private use",
                why=f"forerun uses U+{ord(MARK):X} and similar characters to encode the token as plain text",
                fix="remove one of them from the text",
            )
        return HALF if any_text(messages, has_lone_surrogate) else None

    def _protect(self, messages: Any) -> Any:
        """Return the messages with protected special tokens, unless the job allows special tokens in texts."""
        return messages if self._recipe.special_tokens else self._coder.protection.protect(messages)


def _loss_mask(spoken: RenderedConversation, spans: Spans) -> Mask:
    """Return which tokens have a loss: those with at least one character in a span of the assistant.

    A token without characters has a loss if the next character has one.
    """
    is_assistant = np.zeros(len(spoken.text) + 1, np.bool_)
    for start, stop in spoken.spans:
        is_assistant[start:stop] = True
    is_assistant = unmarked_flags(spoken.text, is_assistant)
    before = np.concatenate([[0], np.cumsum(is_assistant)])
    starts, stops = spans[:, 0], spans[:, 1]
    return np.where(starts < stops, before[stops] > before[starts], is_assistant[starts])


def common_length(one: str, other: str) -> int:
    """Return the number of characters that both texts have in common at the beginning."""
    different = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


def _without_common_spans(spoken: RenderedConversation, parted: int) -> RenderedConversation:
    """Return the conversation without the spans of the assistant that end before the character `parted`.

    The last span is always kept, because it is the answer to compare.
    """
    *before, last = spoken.spans or (None,)
    spans = (*(span for span in before if span and span[1] > parted), last)
    return replace(spoken, spans=tuple(span for span in spans if span))
