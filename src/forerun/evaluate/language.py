"""What lm-eval's tasks need beside scores: text to tokens and back, and how tokens are to be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Wish:
    """How a task wants its answers written. Temperature 0 takes the likeliest token."""

    max_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


# Tokens that follow each prompt, until the end token, a stop text (which may be among them) or the most that may be.
Generate = Callable[[Sequence[Sequence[int]], Wish], list[list[int]]]


@dataclass(frozen=True)
class Language:
    """A tokenizer, as functions. No function adds special tokens by itself."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    eos: int
    prefix: int  # stands before a text that has nothing before it: the beginning token, else the end token
    prefix_text: str | None = None
    opening: tuple[int, ...] = ()  # what the tokenizer puts before every text
    chat_template: str | None = None
    render: Callable[[Messages, bool], str] | None = None  # (messages, whether the answer is to begin) -> text
