"""Recipes: all settings that determine the tokens of a row, as plain data for workers and for the key of a store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from forerun.data.source.sources import Source
    from forerun.data.tokenizer import Tokenizer

FORMAT = 1  # of the store; part of its key
CONVERSATIONS = 2  # version of the encoding of conversations, part of the key of their stores
BYTES = "bytes"
PLACES = ("tokenizer", "template_origin")  # settings that do not change the tokens


@dataclass(frozen=True)
class Recipe:
    """Settings that determine how rows become tokens.

    Every token id must be below `vocab`. `special` maps names such as bos_token to their texts, and other variables of
    the template, such as enable_thinking, to their values.
    """

    tokenizer: str  # 'bytes', or the path of a tokenizer.json
    tokenizer_digest: str  # of its content; the key contains it in place of the path
    eos: int
    vocab: int
    template: str | None = None
    special: dict[str, Any] = field(default_factory=dict)
    loss_on: Literal["answers", "all"] = "answers"
    special_tokens: bool = False
    validation: float = 0.0
    template_origin: str | None = None  # for errors: the key of the job and the file that the template comes from
    apply_template: bool = False  # convert prompts and answers that are plain text to messages
    system: str | None = None  # system prompt of conversations without one
    ignored_fields: tuple[str, ...] = ()  # fields of messages, or tools, that the template does not get

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Recipe:
        return Recipe(**values | {"ignored_fields": tuple(values["ignored_fields"])})

    def settings(self) -> dict[str, Any]:
        """Return the settings that are part of the key: all except the locations of tokenizer and template.

        A setting that was added later is included only if it changes the tokens, so that older keys stay valid.
        """
        unset = [name for name in ("apply_template", "system", "ignored_fields") if not getattr(self, name)]
        omitted = (*PLACES, *unset)
        found = {name: value for name, value in asdict(self).items() if name not in omitted} | {"format": FORMAT}
        return found if self.template is None else found | {"conversations": CONVERSATIONS}

    def key(self, source: Source) -> str:
        """Return the key of a store, 32 hex digits of the contents and form of the source and of the settings."""
        return hashlib.sha256(canonical([source.identities(), _form(source), self.settings()])).hexdigest()[:32]


def recipe_for(tokenizer: Tokenizer, vocab: int | None = None, **settings: Any) -> Recipe:
    """Return the recipe for a tokenizer. `settings` are other fields of `Recipe`.

    `vocab` is the vocabulary size of the model, by default that of the tokenizer.
    """
    digest = BYTES if tokenizer.path == BYTES else _digest(tokenizer.path)
    return Recipe(tokenizer.path, digest, tokenizer.eos, tokenizer.vocab if vocab is None else vocab, **settings)


def canonical(value: Any) -> bytes:
    """Return bytes that are the same for equal values, as compact JSON with sorted keys.

    Surrogates are kept. An array is written as a list, another value that JSON cannot represent as its `str`.
    """
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", errors="surrogatepass")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def is_validation(values: dict[str, Any], share: float) -> bool:
    """Return whether a row is held out for validation, which depends only on a hash of its content.

    A row therefore stays on its side when others are added, and copies of a row are on the same side.
    """
    number = int.from_bytes(hashlib.sha256(canonical(values)).digest()[:8], "big")
    return number < share * 2.0**64


def _form(source: Source) -> dict[str, Any]:
    """Return how the files are read. Keys that were added later are included only if set, so older keys stay valid."""
    form = {name: getattr(source, name) for name in ("kind", "form", "columns")}
    later = {name: getattr(source, name) for name in ("separator", "limit")}
    return form | {name: value for name, value in later.items() if value is not None}


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
