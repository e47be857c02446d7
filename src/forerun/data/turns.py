"""Prompts for chat: conversations tokenized as in training, and the end of the assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.data.tokenizer import Tokenizer
from forerun.data.tokenizer_file import read_content
from forerun.data.tokens.protection import Protection, is_protected, special_pattern
from forerun.errors import UserError
from forerun.hub.chat.template import Message, render_all
from forerun.hub.chat.turn_end import turn_tail


@dataclass(frozen=True)
class TurnEnd:
    """The end of the assistant's turn: a text, and its token if it is a single one.

    Both are None if the template does not end turns.
    """

    token: int | None = None
    text: str | None = None

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer; empty if a single token ends it."""
        return () if self.text is None or self.token is not None else (self.text,)


def turn_end(template: str | None, special: Mapping[str, Any], tokenizer: Tokenizer) -> TurnEnd:
    """Return the end of a turn, which is found by rendering a short conversation."""
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
    special: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    special_tokens: bool = False,
    origin: str | None = None,
) -> list[list[int]]:
    """Return the tokens of each conversation, with the template's generation prompt at the end.

    Args:
      conversations: the messages of each conversation.
      template: the Jinja text of the chat template.
      special: texts of special tokens that the template uses, by name.
      tokenizer: the tokenizer of the model.
      special_tokens: encode special tokens that are written out in a message as such. By default they stay plain text,
        as in training, so that a message cannot end its own turn.
      origin: what errors call the template; None for the model's own.
    """
    protection = Protection(tokenizer.specials, tokenizer.vocab, lambda: read_content(Path(tokenizer.path)))
    protected = [one if special_tokens else protection.protect(one) for one in conversations]
    texts = render_all(template, protected, special=special, origin=origin)
    return [
        _ids(tokenizer.encode(text)) if one is before else _encode_protected(text, before, tokenizer, protection)
        for text, one, before in zip(texts, protected, conversations, strict=True)
    ]


def _encode_protected(
    text: str, messages: Sequence[Message], tokenizer: Tokenizer, protection: Protection
) -> list[int]:
    """Encode a rendered conversation whose messages have special tokens written out."""
    if protection.is_ambiguous(messages):
        raise UserError(
            "E-DATA-110",
            "a message contains both a special token and private-use characters",
            why="the encoder uses these characters to encode the token as plain text",
            fix="remove one of them from the message",
        )
    return _ids(protection.encode(text)[0] if is_protected(text) else tokenizer.encode(text))


def _ids(ids: Any) -> list[int]:
    return [int(token) for token in ids]
