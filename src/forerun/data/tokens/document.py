"""Encoding of rows: the tokens of each document, and which of them have a loss.

Prompts and answers of a row become the messages of a conversation, or two plain texts. Alpaca rows have an instruction,
optionally an input, and an output. As messages, the user says the instruction and, on the next line, the input. As
plain text, the prompt is the one that the Alpaca models were trained with.

`forerun.data.source.values` has checked the types of all values of a row, so the encoders do not check them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.data.source.rows import BadRow, SourceRow
from forerun.data.tokens.coder import DEEP, EMPTY, FORGED, HALF, Coder, has_lone_surrogate, open_coder
from forerun.data.tokens.conversation import Conversations
from forerun.data.tokens.pair import PairCoder
from forerun.data.tokens.protection import Ids
from forerun.data.tokens.recipe import Recipe
from forerun.errors import Problem, UserError

PROMPT_FORMS = ("prompt/completion", "alpaca")  # plain texts that can become messages
CONVERSATION_FORMS = ("messages", "prompt/completion messages")  # rows that contain messages
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{0}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{0}\n\n### Input:\n{1}\n\n### Response:\n"
)


def conversation_of(form: str, values: dict[str, Any]) -> tuple[list[Any], int]:
    """Return the messages of a row, and how many of them are the prompt, whose answers have no loss."""
    if form == "messages":
        return values["messages"], 0
    if form == "alpaca":
        said = values.get("input", "")
        asked = f"{values['instruction']}\n{said}" if said else values["instruction"]
        return [_text_message("user", asked), _text_message("assistant", values["output"])], 0
    prompt, completion = values["prompt"], values["completion"]
    asked = [_text_message("user", prompt)] if isinstance(prompt, str) else prompt
    answer = [_text_message("assistant", completion)] if isinstance(completion, str) else completion
    return [*asked, *answer], len(asked)


def plain_texts(form: str, values: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt and the completion of a row, to be joined without a chat template."""
    if form != "alpaca":
        return values["prompt"], values["completion"]
    said = values.get("input", "")
    asked = _ALPACA_WITH_INPUT if said else _ALPACA
    return asked.format(values["instruction"], said), values["output"]


def _text_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


Mask = NDArray[np.bool_]


FORMS = ("text", *CONVERSATION_FORMS, *PROMPT_FORMS, "chosen/rejected", "input_ids")


class Encoded(NamedTuple):
    """A document: its tokens, and which of them have a loss (None: all).

    For a preference pair, the tokens are those of the chosen side, and `rejected` is the other side.
    """

    tokens: Ids
    learned: Mask | None
    rejected: tuple[Ids, Mask | None] | None = None

    @property
    def documents(self) -> tuple[tuple[Ids, Mask | None], ...]:
        """The documents to store: one, or both sides of a pair."""
        own = (self.tokens, self.learned)
        return (own,) if self.rejected is None else (own, self.rejected)


class Encoder:
    """An encoder of rows of one form with one recipe."""

    def __init__(self, recipe: Recipe, form: str) -> None:
        if form not in FORMS:
            raise UserError(
                "E-DATA-093",
                f"rows of the form {form} are not supported",
                why=f"the forms are {', '.join(FORMS)}",
                fix="name the columns to train on: data.columns.prompt=... data.columns.completion=...",
            )
        self.recipe, self.form = recipe, form
        self.coder: Coder = open_coder(recipe.tokenizer)
        self._end = np.array([recipe.eos], np.int32)
        self._answers = recipe.loss_on == "answers"
        chat = form in CONVERSATION_FORMS or (form in PROMPT_FORMS and recipe.apply_template)
        self._conversations = Conversations(self.coder, recipe) if chat else None
        self._pairs = PairCoder(self.coder, recipe) if form == "chosen/rejected" else None

    def encode(self, rows: Sequence[SourceRow]) -> list[Encoded | BadRow]:
        """Return a document or a bad row for each row."""
        return [self._checked(row, found) for row, found in zip(rows, self._encode_or_problem(rows), strict=True)]

    def _encode_or_problem(self, rows: Sequence[SourceRow]) -> list[Encoded | Problem]:
        """Return a document or a problem for each row. Exceptions that a text can cause become problems."""
        try:
            return self._encoded(rows)
        except (UnicodeEncodeError, RecursionError, TypeError) as error:
            if len(rows) > 1:  # one bad row fails the batch: encode the rows separately to find it
                return [one for row in rows for one in self._encode_or_problem([row])]
            if isinstance(error, TypeError) and not any(
                has_lone_surrogate(str(value)) for value in rows[0].values.values()
            ):
                raise  # not the TypeError that the tokenizer raises for half of a surrogate pair
            return [DEEP if isinstance(error, RecursionError) else HALF]

    def _encoded(self, rows: Sequence[SourceRow]) -> list[Encoded | Problem]:
        if self.form == "text":
            return self._texts([row.values["text"] for row in rows])
        if self._conversations is not None:
            found = [conversation_of(self.form, row.values) for row in rows]
            tools = [row.values.get("tools") for row in rows]
            coded = self._conversations.encode(
                [messages for messages, _ in found], [prompt for _, prompt in found], tools
            )
            return [one if isinstance(one, Problem) else Encoded(*one) for one in coded]
        if self.form in PROMPT_FORMS:
            return self._completions(rows)
        if self._pairs is not None:
            return [
                one if isinstance(one, Problem) else Encoded(*one[0], one[1])
                for one in self._pairs.encode([row.values for row in rows])
            ]
        return [self._token_ids(row.values) for row in rows]

    def _texts(self, texts: Sequence[str]) -> list[Encoded | Problem]:
        encode = self.coder.encode_with_specials if self.recipe.special_tokens else self.coder.encode_plain
        return [self._with_end(ids) if len(ids) else EMPTY for ids in encode(texts)]

    def _with_end(self, ids: Ids) -> Encoded:
        return Encoded(np.concatenate([ids, self._end]), None)

    def _completions(self, rows: Sequence[SourceRow]) -> list[Encoded | Problem]:
        """Return documents of prompts and completions, encoded separately so that no token contains parts of both."""
        asked: Callable[[Sequence[str]], list[Ids]] = self.coder.encode_plain
        answered: Callable[[Sequence[str]], list[Ids]] = self.coder.encode_continuations
        if self.recipe.special_tokens:
            asked = answered = self.coder.encode_with_specials
        texts = [plain_texts(self.form, row.values) for row in rows]
        prompts = asked([prompt for prompt, _ in texts])
        completions = answered([completion for _, completion in texts])
        return [self._joined(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def _joined(self, prompt: Ids, completion: Ids) -> Encoded | Problem:
        if not len(prompt) and not len(completion):
            return EMPTY
        tokens = np.concatenate([prompt, completion, self._end])
        if not self._answers or not len(prompt):
            return Encoded(tokens, None)
        learned = np.ones(len(tokens), np.bool_)
        learned[: len(prompt)] = False
        return Encoded(tokens, learned)

    def _token_ids(self, values: dict[str, Any]) -> Encoded | Problem:
        """Return the document of token ids in the data, with an end token added if it is missing."""
        ids = np.asarray(values["input_ids"])
        beyond = self._id_problem(ids)
        if beyond is not None:
            return beyond
        mask = values.get("loss_mask")
        learned = None if mask is None or not self._answers else np.asarray(mask, np.bool_)
        tokens = ids.astype(np.int32)
        if tokens[-1] != self.recipe.eos:
            tokens = np.concatenate([tokens, self._end])
            learned = None if learned is None else np.concatenate([learned, learned[-1:]])
        if learned is not None and not learned.any():
            return Problem(
                "E-DATA-096", "loss_mask excludes all tokens", why="all its values are 0", fix="remove the row"
            )
        return Encoded(tokens, None if learned is None or learned.all() else learned)

    def _checked(self, row: SourceRow, found: Encoded | Problem) -> Encoded | BadRow:
        """Return the document, or a bad row for a problem, an id beyond the vocabulary, or a forged special token."""
        if isinstance(found, Encoded) and self.form != "input_ids":
            every = [tokens for tokens, _ in found.documents]
            trouble: Problem | None = next((one for one in map(self._id_problem, every) if one is not None), None)
            lists = any(isinstance(value, list) for value in row.values.values())
            chat = self.form in CONVERSATION_FORMS or self.recipe.apply_template or lists
            if trouble is None and not chat and not self.recipe.special_tokens:
                trouble = FORGED if any(self.coder.protection.has_special(tokens[:-1]) for tokens in every) else None
        else:
            trouble = found if isinstance(found, Problem) else None
        if trouble is not None:
            return BadRow.of(trouble, row.place)
        assert isinstance(found, Encoded)
        return found

    def _id_problem(self, ids: NDArray[Any]) -> Problem | None:
        """Return the problem of an id outside the vocabulary, or None."""
        low, high = int(ids.min()), int(ids.max())
        if low >= 0 and high < self.recipe.vocab:
            return None
        return Problem(
            "E-DATA-097",
            f"token id {high if high >= self.recipe.vocab else low} is beyond the vocabulary of {self.recipe.vocab}",
            why="the model has no embedding for it",
            fix="tokenize with the tokenizer of the model, or name the correct one: data.tokenizer=PATH",
        )
