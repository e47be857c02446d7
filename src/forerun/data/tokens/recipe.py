"""Everything that decides which tokens a row becomes, as plain data for the workers and the store's key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from forerun.data.source.rows import Piece

if TYPE_CHECKING:
    from forerun.data.tokenizer import Tokenizer

FORMAT = 1  # of the store; another number is another key
BYTES = "bytes"
PLACES = ("tokenizer", "template_origin")


class Source(Protocol):
    """What is needed of `forerun.data.source`."""

    def pieces(self, piece_bytes: int) -> list[Piece]: ...
    def identities(self) -> list[str]:
        """A digest of each file's content."""

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Recipe:
    """How rows become tokens. `vocab` is the bound that every id is held to; `special` are texts such as bos_token."""

    tokenizer: str  # 'bytes', or the path of a tokenizer.json
    tokenizer_digest: str  # of its content; the path is not part of the key
    eos: int
    vocab: int
    template: str | None = None
    special: dict[str, str] = field(default_factory=dict)
    loss_on: Literal["answers", "all"] = "answers"
    special_tokens: bool = False
    validation: float = 0.0
    template_origin: str | None = None  # for errors: the job's key and file that the template is from
    apply_template: bool = False  # plain texts of prompts and answers become messages

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Recipe:
        return Recipe(**values)

    def settings(self) -> dict[str, Any]:
        """Return what the key is made of: all but the places of the tokenizer and of the template.

        A setting that came later is part of it only where it changes the tokens, so older keys stay valid.
        """
        omitted = PLACES if self.apply_template else (*PLACES, "apply_template")
        return {name: value for name, value in asdict(self).items() if name not in omitted} | {"format": FORMAT}

    def key(self, source: Source) -> str:
        """32 hex digits: the same contents, form, tokenizer and settings give the same key."""
        return hashlib.sha256(canonical([source.identities(), _form(source), self.settings()])).hexdigest()[:32]


def recipe_for(
    tokenizer: Tokenizer,
    *,
    vocab: int | None = None,
    template: str | None = None,
    special: dict[str, str] | None = None,
    loss_on: Literal["answers", "all"] = "answers",
    special_tokens: bool = False,
    validation: float = 0.0,
    template_origin: str | None = None,
    apply_template: bool = False,
) -> Recipe:
    """The recipe of a tokenizer that was read from a file, or of bytes. `vocab` is the model's, if it is known."""
    path = tokenizer.path
    digest = BYTES if path == BYTES else _digest(path)
    bound = tokenizer.vocab if vocab is None else vocab
    return Recipe(
        path,
        digest,
        tokenizer.eos,
        bound,
        template,
        special or {},
        loss_on,
        special_tokens,
        validation,
        template_origin,
        apply_template,
    )


def canonical(value: Any) -> bytes:
    """The same value, the same bytes. Surrogates stay as they are, whatever else cannot be JSON is its text."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
    return text.encode("utf-8", errors="surrogatepass")


def is_validation(values: dict[str, Any], share: float) -> bool:
    """By the content of the row alone: a document never changes sides when others come, and copies stay together."""
    number = int.from_bytes(hashlib.sha256(canonical(values)).digest()[:8], "big")
    return number < share * 2.0**64


def _form(source: Source) -> dict[str, Any]:
    """Return how the files are read. A separator is part of it only where there is one, so older keys stay valid."""
    separator = getattr(source, "separator", None)
    form = {name: getattr(source, name, None) for name in ("kind", "form", "columns")}
    return form if separator is None else form | {"separator": separator}


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
