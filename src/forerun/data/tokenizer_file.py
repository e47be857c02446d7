"""Safe reading of an untrusted tokenizer.json: limits on its size, its values and the growth of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import UserError, first_line
from forerun.files import read_regular
from forerun.units import MIB

if TYPE_CHECKING:
    import tokenizers

MAX_FILE_BYTES = 128 * MIB  # the largest published ones have about 35 MB
MAX_VALUES = 8_000_000  # Gemma 3, with 262,144 tokens and 514,906 merges, has 1.8 million
MAX_TOKEN_CHARACTERS = 16_384
MAX_TOKEN_ID = (1 << 24) - 1
MAX_GROWTH = 256  # published tokenizers stay below 20


def read_tokenizer(path: Path) -> tuple[bytes, tokenizers.Tokenizer]:
    """Return the bytes of a tokenizer.json and the tokenizer itself.

    Raises:
        UserError: The file is not a tokenizer.json, or it exceeds a limit.
    """
    import tokenizers

    raw = read_content(path)
    try:
        inner = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            "E-DATA-081",
            f"data.tokenizer: {path} is not a tokenizer.json",
            why=first_line(error),
            fix="give the tokenizer.json that comes with the model, or data.tokenizer=bytes",
        ) from error
    vocabulary = inner.get_vocab(with_added_tokens=True)
    if max(vocabulary.values(), default=0) > MAX_TOKEN_ID:
        raise _unsafe(path, f"it has the token id {max(vocabulary.values())}, and the limit is {MAX_TOKEN_ID}")
    longest = max(map(len, vocabulary), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise _unsafe(path, f"it has a token of {longest} characters, and the limit is {MAX_TOKEN_CHARACTERS}")
    for part in (inner.normalizer, inner.decoder):
        if part is not None and growth(json.loads(part.__getstate__())) > MAX_GROWTH:
            raise _unsafe(path, f"its {type(part).__name__} can make a text more than {MAX_GROWTH} times as long")
    return raw, inner


def read_content(path: Path) -> bytes:
    """Return the bytes of a tokenizer.json whose size and number of values are within the limits."""
    try:
        raw = read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(
            "E-DATA-082",
            f"data.tokenizer: {path} cannot be read",
            why=str(error.strerror),
            fix="check the file and its permissions",
        ) from error
    # Every value follows one of these characters. The parser needs up to 200 bytes of memory for a value.
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise _unsafe(path, f"it has more than {MAX_VALUES} values")
    return raw


def growth(part: Any) -> int:
    """Return a bound on how many times longer a normalizer or a decoder can make a text.

    The steps of a sequence multiply: ten of them that double an "e" make it 1024 times as long.
    """
    bound = 1
    if isinstance(part, dict):
        added = max((len(str(part.get(key, "")).encode()) for key in ("content", "prepend")), default=0)
        pattern = part.get("pattern")
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression can match nothing, and then adds its content between all characters.
        bound = max(1, -(-added // len(plain.encode()))) if plain else 1 + added
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for value in inner:
        bound = min(bound * growth(value), 10**9)
    return bound


def _unsafe(path: Path, why: str) -> UserError:
    return UserError(
        "E-DATA-083",
        f"data.tokenizer: {path} cannot be used",
        why=f"{why}; no published tokenizer needs that",
        fix="use the tokenizer.json of the model's publisher, and do not trust this one",
    )
