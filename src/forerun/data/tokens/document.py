"""Rows to tokens and to which of them are learned, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.data.source.rows import Bad, Row
from forerun.data.tokens.coder import Coder, Ids, open_coder
from forerun.data.tokens.conversation import Conversations, as_messages
from forerun.data.tokens.pair import PairCoder
from forerun.data.tokens.recipe import Recipe
from forerun.data.tokens.trouble import DEEP, EMPTY, FORGED, HALF, Trouble, is_half, said
from forerun.errors import UserError

Mask = NDArray[np.bool_]


FORMS = ("text", "messages", "prompt/completion", "chosen/rejected", "input_ids")


class Encoded(NamedTuple):
    """A document; `learned` None is all of it. Of a pair, the chosen side, with the rejected one beside it."""

    tokens: Ids
    learned: Mask | None
    rejected: tuple[Ids, Mask | None] | None = None

    @property
    def documents(self) -> tuple[tuple[Ids, Mask | None], ...]:
        """As they are stored: one, or the two of a pair."""
        own = (self.tokens, self.learned)
        return (own,) if self.rejected is None else (own, self.rejected)


class Encoder:
    """One form of rows, one recipe."""

    def __init__(self, recipe: Recipe, form: str) -> None:
        if form not in FORMS:
            raise UserError(
                f"rows of {form} cannot be made into documents",
                why=f"{', '.join(FORMS)} can",
                fix="name the columns to learn from: data.columns.prompt=... data.columns.completion=...",
            )
        self.recipe, self.form = recipe, form
        self.coder: Coder = open_coder(recipe.tokenizer)
        self._end = np.array([recipe.eos], np.int32)
        self._answers = recipe.loss_on == "answers"
        self._applies = form == "prompt/completion" and recipe.apply_template
        self._conversations = Conversations(self.coder, recipe) if form == "messages" or self._applies else None
        self._pairs = PairCoder(self.coder, recipe) if form == "chosen/rejected" else None

    def encode(self, rows: Sequence[Row]) -> list[Encoded | Bad]:
        """A document or a bad row for each."""
        good = [row for row in rows if _wrong_type(row.values) is None]
        found = iter(self._found(good))
        return [self._checked(row, _wrong_type(row.values) or next(found)) for row in rows]

    def _found(self, rows: Sequence[Row]) -> list[Encoded | Trouble]:
        try:
            return self._encoded(rows)
        except (UnicodeEncodeError, RecursionError, TypeError) as error:
            if len(rows) > 1:  # one of them spoils the call for all
                return [one for row in rows for one in self._found([row])]
            if isinstance(error, TypeError) and not any(is_half(str(value)) for value in rows[0].values.values()):
                raise  # which is not how the tokenizer says it
            return [DEEP if isinstance(error, RecursionError) else HALF]

    def _encoded(self, rows: Sequence[Row]) -> list[Encoded | Trouble]:
        if self.form == "text":
            return self._texts([row.values["text"] for row in rows])
        if self._conversations is not None:
            return [
                one if isinstance(one, Trouble) else Encoded(*one)
                for one in self._conversations.encode([self._messages(row.values) for row in rows])
            ]
        if self.form == "prompt/completion":
            return self._answered(rows)
        if self._pairs is not None:
            return [
                one if isinstance(one, Trouble) else Encoded(*one[0], one[1])
                for one in self._pairs.encode([row.values for row in rows])
            ]
        return [self._given(row.values) for row in rows]

    def _messages(self, values: dict[str, Any]) -> Any:
        return as_messages(values["prompt"], values["completion"]) if self._applies else values["messages"]

    def _texts(self, texts: Sequence[str]) -> list[Encoded | Trouble]:
        encode = self.coder.marked if self.recipe.special_tokens else self.coder.plain
        return [self._closed(ids) if len(ids) else EMPTY for ids in encode(texts)]

    def _closed(self, ids: Ids) -> Encoded:
        return Encoded(np.concatenate([ids, self._end]), None)

    def _answered(self, rows: Sequence[Row]) -> list[Encoded | Trouble]:
        asked: Callable[[Sequence[str]], list[Ids]] = self.coder.plain
        answered: Callable[[Sequence[str]], list[Ids]] = self.coder.continued
        if self.recipe.special_tokens:
            asked = answered = self.coder.marked
        prompts = asked([row.values["prompt"] for row in rows])
        completions = answered([row.values["completion"] for row in rows])
        return [self._joined(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def _joined(self, prompt: Ids, completion: Ids) -> Encoded | Trouble:
        if not len(prompt) and not len(completion):
            return EMPTY
        tokens = np.concatenate([prompt, completion, self._end])
        if not self._answers or not len(prompt):
            return Encoded(tokens, None)
        learned = np.ones(len(tokens), np.bool_)
        learned[: len(prompt)] = False
        return Encoded(tokens, learned)

    def _given(self, values: dict[str, Any]) -> Encoded | Trouble:
        given = values["input_ids"]
        ids = np.asarray(given)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            return Trouble(
                "input_ids is not a list of token ids",
                why=f"it is {said(given)}",
                fix='give a list of whole numbers: {"input_ids": [15496, 995]}, and take the row out if it is empty',
            )
        beyond = self._beyond(ids)
        if beyond is not None:
            return beyond
        mask = values.get("loss_mask")
        learned = None if mask is None or not self._answers else np.asarray(mask)
        if learned is not None and (learned.shape != ids.shape or not np.isin(learned, (0, 1)).all()):
            return Trouble(
                "loss_mask does not fit input_ids",
                why=f"{len(ids)} ids, and a mask that is {said(mask)}",
                fix="give one 0 or 1 for each id",
            )
        tokens = ids.astype(np.int32)
        learned = None if learned is None else learned.astype(np.bool_)
        if tokens[-1] != self.recipe.eos:
            tokens = np.concatenate([tokens, self._end])
            learned = None if learned is None else np.concatenate([learned, learned[-1:]])
        if learned is not None and not learned.any():
            return Trouble("loss_mask leaves nothing to learn", why="it is 0 everywhere", fix="take the row out")
        return Encoded(tokens, None if learned is None or learned.all() else learned)

    def _checked(self, row: Row, found: Encoded | Trouble) -> Encoded | Bad:
        if isinstance(found, Encoded) and self.form != "input_ids":
            every = [tokens for tokens, _ in found.documents]
            trouble: Trouble | None = next((one for one in map(self._beyond, every) if one is not None), None)
            lists = any(isinstance(value, list) for value in row.values.values())
            chat = self.form == "messages" or self.recipe.apply_template or lists
            if trouble is None and not chat and not self.recipe.special_tokens:
                trouble = FORGED if any(self.coder.forged(tokens[:-1]) for tokens in every) else None
        else:
            trouble = found if isinstance(found, Trouble) else None
        if trouble is not None:
            return Bad(row.place, trouble.what, trouble.why, trouble.fix)
        assert isinstance(found, Encoded)
        return found

    def _beyond(self, ids: NDArray[Any]) -> Trouble | None:
        low, high = int(ids.min()), int(ids.max())
        if low >= 0 and high < self.recipe.vocab:
            return None
        return Trouble(
            f"id {high if high >= self.recipe.vocab else low} beyond the vocabulary of {self.recipe.vocab}",
            why="the model has no row for it",
            fix="tokenize with the model's own tokenizer, or name it: data.tokenizer=PATH",
        )


def _wrong_type(values: dict[str, Any]) -> Trouble | None:
    for name in ("text", "prompt", "completion") if "chosen" not in values else ():
        if name in values and not isinstance(values[name], str):
            return Trouble(f"{name} is no text", why=f"it is {said(values[name])}", fix="give a string")
    return None
