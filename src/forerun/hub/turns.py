"""The text that a chat template writes behind an answer: it ends the assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import UserError
from forerun.hub.chat import Spoken, render_all, spoken_all

QUESTION, ANSWER = "Which answer?", "Thisanswer"
PROBE = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def turn_tail(template: str, special: Mapping[str, str]) -> str:
    """Return what follows an answer in its turn, such as `<|im_end|>`; "" if the template marks no end.

    The template renders one short conversation. A template that cannot render it has no known end either: the
    cause is reported when the user's own messages are rendered.
    """
    try:
        (found,) = spoken_all(template, [PROBE], special=special, ends=())
    except UserError:
        return ""
    if not isinstance(found, Spoken) or not found.spans:
        return ""
    start, stop = found.spans[-1]
    said, answer, tail = found.text[start:stop].rpartition(ANSWER)
    return tail.strip() if answer or said else ""


def renders_alike(template: str, special: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether the template writes the same text with other texts of special tokens."""
    conversations = [PROBE, PROBE[:1], PROBE * 2]
    try:
        one, two = (render_all(template, conversations, special=texts) for texts in (special, other))
    except UserError:
        return False
    return one == two
