"""Preference pairs to tokens: an answer that was chosen and one that was rejected, each behind what they answer.

Both sides begin with the same tokens, of which nothing counts. Rows may hold texts or lists of messages, with or
without a prompt of their own; without one the prompt is what both sides begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.tokens.coder import Coder, Ids
from forerun.data.tokens.conversation import Conversations, common_length
from forerun.data.tokens.recipe import Recipe
from forerun.data.tokens.trouble import Trouble, said

Side = tuple[Ids, NDArray[np.bool_] | None]  # tokens, and which of them belong to the answer (None: all)
Pair = tuple[Side, Side]  # chosen, rejected

SAME = Trouble(
    "chosen and rejected are the same",
    why="there is nothing to prefer in it",
    fix="take the row out, or allow it to be passed over: data.bad_rows=1",
)


class PairCoder:
    """Encodes many pairs at a time."""

    def __init__(self, coder: Coder, recipe: Recipe) -> None:
        self._coder, self._recipe = coder, recipe
        self._end = np.array([recipe.eos], np.int32)
        self._conversations: Conversations | None = None

    def encode(self, rows: Sequence[dict[str, Any]]) -> list[Pair | Trouble]:
        """A pair, or what is wrong, for each."""
        found: list[Pair | Trouble | None] = [_trouble(row) for row in rows]
        applied = self._recipe.apply_template
        texts = [n for n, row in enumerate(rows) if found[n] is None and not _is_chat(row, applied)]
        chats = [n for n, row in enumerate(rows) if found[n] is None and _is_chat(row, applied)]
        for numbers, encode in ((texts, self._texts), (chats, self._chats)):
            for number, pair in zip(numbers, encode([rows[number] for number in numbers]), strict=True):
                found[number] = pair
        return [one for one in found if one is not None]

    def _texts(self, rows: Sequence[dict[str, Any]]) -> list[Pair | Trouble]:
        parts = [_parted(row) for row in rows]
        asked: Callable[[Sequence[str]], list[Ids]] = self._coder.plain
        answered: Callable[[Sequence[str]], list[Ids]] = self._coder.continued
        if self._recipe.special_tokens:
            asked = answered = self._coder.marked
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

    def _chats(self, rows: Sequence[dict[str, Any]]) -> list[Pair | Trouble]:
        if not rows:
            return []
        if self._conversations is None:
            self._conversations = Conversations(self._coder, self._recipe)
        chosen = [_conversation(row, "chosen") for row in rows]
        rejected = [_conversation(row, "rejected") for row in rows]
        found: list[Pair | Trouble] = []
        for one, other in self._conversations.encode_pairs(chosen, rejected):
            if isinstance(one, Trouble) or isinstance(other, Trouble):
                found.append(one if isinstance(one, Trouble) else other if isinstance(other, Trouble) else SAME)
            else:
                found.append(SAME if np.array_equal(one[0], other[0]) else (one, other))
        return found


def _trouble(row: dict[str, Any]) -> Trouble | None:
    for name in ("chosen", "rejected", "prompt"):
        if name in row and not isinstance(row[name], str | list):
            return Trouble(f"{name} is neither text nor messages", why=f"it is {said(row[name])}", fix="give a string")
    if type(row["chosen"]) is not type(row["rejected"]):
        return Trouble(
            "chosen and rejected are of different kinds",
            why=f"{said(row['chosen'])} and {said(row['rejected'])}",
            fix="give two texts, or two lists of messages",
        )
    return None


def _is_chat(row: dict[str, Any], applied: bool) -> bool:
    """Return whether a pair is made of messages, or of texts that become messages. Texts need a prompt for that."""
    return (applied and "prompt" in row) or any(isinstance(row.get(name), list) for name in ("chosen", "prompt"))


def _parted(row: dict[str, Any]) -> tuple[str, str, str]:
    """Prompt, chosen, rejected. Without a prompt: what both begin with, up to the last space in it."""
    if "prompt" in row:
        return row["prompt"], row["chosen"], row["rejected"]
    shared = row["chosen"][: common_length(row["chosen"], row["rejected"])]
    shared = shared[: 1 + max(shared.rfind(" "), shared.rfind("\n"))].rstrip(" ")
    return shared, row["chosen"][len(shared) :], row["rejected"][len(shared) :]


def _conversation(row: dict[str, Any], side: str) -> list[Any]:
    """The prompt's messages and the side's, unless these begin with the prompt themselves."""
    prompt, own = row.get("prompt", []), row[side]
    if isinstance(own, str):
        own = [{"role": "assistant", "content": own}]
    if isinstance(prompt, str):
        users = (message.get("content") for message in own if message.get("role") == "user")
        return own if prompt in users or not prompt else [{"role": "user", "content": prompt}, *own]
    return own if own[: len(prompt)] == prompt else [*prompt, *own]
