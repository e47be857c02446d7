"""Encoding of preference pairs: a chosen and a rejected answer, each after the common prompt.

Both sides begin with the tokens of the prompt, which have no loss. Rows contain texts or lists of messages, with or
without a prompt column. Without it, the prompt is the common beginning of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.tokens.coder import Coder, said
from forerun.data.tokens.conversation import Conversations, common_length
from forerun.data.tokens.protection import Ids
from forerun.data.tokens.recipe import Recipe
from forerun.errors import Problem

Side = tuple[Ids, NDArray[np.bool_] | None]  # tokens, and which of them belong to the answer (None: all)
Pair = tuple[Side, Side]  # chosen, rejected

SAME = Problem(
    "E-DATA-100",
    "chosen and rejected are the same",
    why="the row has no preference to learn",
    fix="remove the row, or skip it: data.bad_rows=1",
)


class PairCoder:
    """An encoder of batches of preference pairs."""

    def __init__(self, coder: Coder, recipe: Recipe) -> None:
        self._coder, self._recipe = coder, recipe
        self._end = np.array([recipe.eos], np.int32)
        self._conversations: Conversations | None = None

    def encode(self, rows: Sequence[dict[str, Any]]) -> list[Pair | Problem]:
        """Return a pair or a problem for each row."""
        found: list[Pair | Problem | None] = [_type_problem(row) for row in rows]
        applied = self._recipe.apply_template
        texts = [n for n, row in enumerate(rows) if found[n] is None and not _is_chat(row, applied)]
        chats = [n for n, row in enumerate(rows) if found[n] is None and _is_chat(row, applied)]
        for numbers, encode in ((texts, self._texts), (chats, self._chats)):
            for number, pair in zip(numbers, encode([rows[number] for number in numbers]), strict=True):
                found[number] = pair
        return [one for one in found if one is not None]

    def _texts(self, rows: Sequence[dict[str, Any]]) -> list[Pair | Problem]:
        parts = [_split_prompt(row) for row in rows]
        asked: Callable[[Sequence[str]], list[Ids]] = self._coder.encode_plain
        answered: Callable[[Sequence[str]], list[Ids]] = self._coder.encode_continuations
        if self._recipe.special_tokens:
            asked = answered = self._coder.encode_with_specials
        prompts = asked([prompt for prompt, _, _ in parts])
        chosen = answered([chosen for _, chosen, _ in parts])
        rejected = answered([rejected for _, _, rejected in parts])
        return [
            SAME if np.array_equal(one, other) else (self._joined(prompt, one), self._joined(prompt, other))
            for prompt, one, other in zip(prompts, chosen, rejected, strict=True)
        ]

    def _joined(self, prompt: Ids, answer: Ids) -> Side:
        tokens = np.concatenate([prompt, answer, self._end])
        return tokens, np.arange(len(tokens)) >= len(prompt) if len(prompt) else None

    def _chats(self, rows: Sequence[dict[str, Any]]) -> list[Pair | Problem]:
        if not rows:
            return []
        if self._conversations is None:
            self._conversations = Conversations(self._coder, self._recipe)
        chosen = [_conversation(row, "chosen") for row in rows]
        rejected = [_conversation(row, "rejected") for row in rows]
        found: list[Pair | Problem] = []
        for one, other in self._conversations.encode_pairs(chosen, rejected, [row.get("tools") for row in rows]):
            if isinstance(one, Problem) or isinstance(other, Problem):
                found.append(one if isinstance(one, Problem) else other if isinstance(other, Problem) else SAME)
            else:
                found.append(SAME if np.array_equal(one[0], other[0]) else (one, other))
        return found


def _type_problem(row: dict[str, Any]) -> Problem | None:
    if type(row["chosen"]) is not type(row["rejected"]):
        return Problem(
            "E-DATA-102",
            "chosen and rejected have different types",
            why=f"{said(row['chosen'])} and {said(row['rejected'])}",
            fix="use two texts, or two lists of messages",
        )
    return None


def _is_chat(row: dict[str, Any], applied: bool) -> bool:
    """Return whether a pair consists of messages, or of texts with a prompt that become messages."""
    return (applied and "prompt" in row) or any(isinstance(row.get(name), list) for name in ("chosen", "prompt"))


def _split_prompt(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return the texts of prompt, chosen and rejected.

    Without a prompt column, the prompt is the common beginning of both answers, cut before its last spaces or after
    its last line end. Words that differ only at their end are thus not divided.
    """
    if "prompt" in row:
        return row["prompt"], row["chosen"], row["rejected"]
    shared = row["chosen"][: common_length(row["chosen"], row["rejected"])]
    shared = shared[: 1 + max(shared.rfind(" "), shared.rfind("\n"))].rstrip(" ")
    return shared, row["chosen"][len(shared) :], row["rejected"][len(shared) :]


def _conversation(row: dict[str, Any], side: str) -> list[Any]:
    """Return the messages of the prompt and of one side. A prompt that the side already contains is not repeated."""
    prompt, own = row.get("prompt", []), row[side]
    if isinstance(own, str):
        own = [{"role": "assistant", "content": own}]
    if isinstance(prompt, str):
        users = (message.get("content") for message in own if message.get("role") == "user")
        return own if prompt in users or not prompt else [{"role": "user", "content": prompt}, *own]
    return own if own[: len(prompt)] == prompt else [*prompt, *own]
