"""The text that a chat template writes after an answer to end the assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import UserError
from forerun.hub.chat.template import RenderedConversation, render_all, render_conversations

QUESTION, ANSWER = "Which answer?", "Thisanswer"
PROBE = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def turn_tail(template: str, special: Mapping[str, Any]) -> str:
    """Return the text that follows an answer in its turn, such as `<|im_end|>`, or "" if there is none.

    The template renders one short conversation. If that fails, the result is "" too: the cause is reported later, when
    the user's own messages are rendered.
    """
    try:
        (found,) = render_conversations(template, [PROBE], special=special, ends=())
    except UserError:
        return ""
    if not isinstance(found, RenderedConversation) or not found.spans:
        return ""
    start, stop = found.spans[-1]
    said, answer, tail = found.text[start:stop].rpartition(ANSWER)
    return tail.strip() if answer or said else ""


def renders_alike(template: str, special: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the template renders the same text with both mappings of special tokens."""
    conversations = [PROBE, PROBE[:1], PROBE * 2]
    try:
        one, two = (render_all(template, conversations, special=texts) for texts in (special, other))
    except UserError:
        return False
    return one == two
