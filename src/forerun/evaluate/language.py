"""The tokenizer functions and generation settings that tasks of lm-eval need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class GenerationRequest:
    """Generation settings of a task. Temperature 0 chooses the most probable token."""

    max_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


# Returns the new tokens of each prompt, until the end token, a stop text (which may be included) or the maximum number.
Generate = Callable[[Sequence[Sequence[int]], GenerationRequest], list[list[int]]]


@dataclass(frozen=True)
class Language:
    """A tokenizer as functions, which do not add special tokens."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos: int
    prefix: int  # the context of a text without one: the beginning token, or else the end token
    prefix_text: str | None = None
    opening: tuple[int, ...] = ()  # ids that the tokenizer adds before every text
    chat_template: str | None = None
    render: Callable[[Messages, bool], str] | None = None  # (messages, whether to add a generation prompt) -> text
