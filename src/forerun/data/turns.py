"""Conversations for a model that answers: their tokens as in training, and where the model's turn ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.data.tokenizer import Tokenizer
from forerun.data.tokens.coder import open_coder, special_pattern
from forerun.data.tokens.conversation import any_text, spoil_messages
from forerun.errors import UserError
from forerun.hub.chat import Message, render_all
from forerun.hub.turns import turn_tail


@dataclass(frozen=True)
class TurnEnd:
    """The end of the assistant's turn: one token, or a text of several tokens; neither if the template has none."""

    token: int | None = None
    text: str | None = None  # the token's text, or the text that is spelled out

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts at which an answer ends because no single token does it."""
        return () if self.text is None or self.token is not None else (self.text,)


def turn_end(template: str | None, special: Mapping[str, str], tokenizer: Tokenizer) -> TurnEnd:
    """Find the end of a turn by rendering a short conversation."""
    tail = "" if template is None else turn_tail(template, special)
    if not tail:
        return TurnEnd()
    known = special_pattern(list(tokenizer.specials)).search(tail)
    text = known.group() if known else tail
    ids = tokenizer.encode(text)
    return TurnEnd(int(ids[0]) if len(ids) == 1 else None, text)


def chat_prompts(
    conversations: Sequence[Sequence[Message]],
    template: str,
    special: Mapping[str, str],
    tokenizer: Tokenizer,
    *,
    special_tokens: bool = False,
    origin: str | None = None,
) -> list[list[int]]:
    """Return the tokens of each conversation and of the beginning of its answer.

    Special tokens that are written out in a message stay plain text, as in training, unless `special_tokens`: a
    message cannot end its own turn.
    """
    pattern = special_pattern(list(tokenizer.specials))
    plain = [one if special_tokens else spoil_messages(one, pattern) for one in conversations]
    texts = render_all(template, plain, special=special, origin=origin)
    return [
        _ids(tokenizer.encode(text)) if one is before else _spelled_out(text, before, tokenizer)
        for text, one, before in zip(texts, plain, conversations, strict=True)
    ]


def _spelled_out(text: str, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Encode a rendered conversation whose messages have special tokens written out."""
    coder = open_coder(tokenizer.path)
    if any_text(messages, coder.private.search):
        raise UserError(
            "a message has a special token beside characters for private use",
            why="the encoder uses these characters to spell the token out",
            fix="remove one of them from the message",
        )
    ((ids, _),) = coder.written([text])
    return _ids(ids)


def _ids(ids: Any) -> list[int]:
    return [int(token) for token in ids]
