"""The chat template of a job, and prompts for chat: conversations tokenized as in training, and the end of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.config import schema
from forerun.data.tokenizer import Tokenizer, read_content
from forerun.data.tokens.protection import Protection, is_protected, special_pattern
from forerun.errors import UserError
from forerun.files import read_regular
from forerun.hub.chat.render_process import SWITCHES
from forerun.hub.chat.template import CHATML, MAX_TEMPLATE_BYTES, Message, render_all, thinking_switch, turn_tail

BUILT_IN = {"chatml": CHATML}


def job_template(data: schema.Data) -> str | None:
    """Return the text of `data.chat_template`; None if the job does not name one."""
    return None if data.chat_template is None else template_named(data.chat_template, "data.chat_template")


def template_named(name: str, key: str) -> str:
    """Return the text of a built-in template or of a Jinja file. `key` is what errors call the setting."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    try:
        return read_regular(name, MAX_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "E-DATA-002",
            f"{key}: {name} cannot be read",
            why=getattr(error, "strerror", None) or str(error),
            fix="name a Jinja file, or chatml",
        ) from error


def template_origin(data: schema.Data) -> str | None:
    """Return what errors call the job's template; None for the model's own."""
    return None if data.chat_template is None else f"data.chat_template: {data.chat_template}"


def thinking_variables(
    thinking: bool | None, template: str, special: Mapping[str, Any], origin: str | None = None
) -> dict[str, bool]:
    """Return the variable of the template that turns thinking on or off; empty for its default.

    Args:
      thinking: `data.thinking` of the job.
      template: the text of the chat template.
      special: the texts of special tokens that the template uses.
      origin: what errors call the template; None for the model's own.

    Raises:
      UserError: the template has no such variable.
    """
    if thinking is None:
        return {}
    found = thinking_switch(template, special, origin)
    if found is None:
        effort = "; its reasoning_effort has no value for off" if "reasoning_effort" in template else ""
        raise UserError(
            "E-DATA-165",
            f"data.thinking={str(thinking).lower()}: the chat template has no switch for thinking",
            why=f"its generation prompt depends neither on {' nor on '.join(SWITCHES)}{effort}",
            fix="remove data.thinking, or name a template with such a switch: data.chat_template=FILE",
        )
    return {found: thinking}


# ---- Prompts for chat ----


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
        _id_list(tokenizer.encode(text)) if one is before else _encode_protected(text, before, tokenizer, protection)
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
    return _id_list(protection.encode(text)[0] if is_protected(text) else tokenizer.encode(text))


def _id_list(ids: Any) -> list[int]:
    return [int(token) for token in ids]
