"""Tokenizers with added tokens. They are stored as files, because worker processes open a tokenizer by its path."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from forerun.data.source.identity import cache_folder
from forerun.data.tokenizer import FILE_NAME, FileTokenizer, Tokenizer, read_tokenizer
from forerun.errors import UserError
from forerun.files import atomic_write


def extended_tokenizer(base: Tokenizer, plain: Sequence[str], special: Sequence[str]) -> FileTokenizer:
    """Return the tokenizer with new tokens. They get the ids after the largest one, in the order of the arguments.

    The new tokenizer.json is stored in the cache, in a folder that is named after its content.

    Args:
      base: the tokenizer of the model.
      plain: tokens that are recognised in any text.
      special: special tokens, which a text can contain only if the job allows it.

    Raises:
      UserError: a text is a token already, or the tokenizer reads bytes.
    """
    import tokenizers

    if not isinstance(base, FileTokenizer):
        raise UserError(
            "E-DATA-147",
            "model.new_tokens: the byte tokenizer has no other tokens",
            why="data.tokenizer is bytes",
            fix="remove data.tokenizer to use the tokenizer of the checkpoint",
        )
    _, inner = read_tokenizer(Path(base.path))
    for text in (*plain, *special):
        if (known := inner.token_to_id(text)) is not None:
            raise UserError(
                "E-DATA-148",
                f"model.new_tokens: {text!r} is a token already",
                why=f"its id is {known}, and the checkpoint has an embedding for it",
                fix="remove it from model.new_tokens or model.new_special_tokens: the data can use it as it is",
            )
    # Not normalized: a token is found in the text as it is written, before lower case or accents are changed.
    inner.add_tokens([tokenizers.AddedToken(text, normalized=False, special=False) for text in plain])
    inner.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in special])
    content = inner.to_str(pretty=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    path = cache_folder() / "tokenizers" / digest[:32] / FILE_NAME
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content)
    inner.no_truncation()
    inner.no_padding()
    return FileTokenizer(f"{FILE_NAME}:{digest[:16]}", inner, base.eos, str(path))
