"""All documents as one long array of tokens, each document closed by the end-of-document id.

With a cache folder the array is written once and memory-mapped from then on. Its name is a hash of the
documents' contents and the tokenizer's, so a changed file or tokenizer never meets an old cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.tokenizer import Tokenizer
from forerun.errors import UserError


@dataclass(frozen=True)
class Stream:
    """Document d is `tokens[offsets[d]:offsets[d + 1]]`; its last token is the end-of-document id."""

    tokens: NDArray[Any]  # uint16 if the vocabulary allows, else int32
    offsets: NDArray[np.int64]  # documents + 1

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    def digest(self) -> str:
        """Twelve hex digits of all tokens and borders: the same data, the same digest."""
        whole = hashlib.sha256(self.tokens.astype(np.int32).tobytes())
        whole.update(self.offsets.tobytes())
        return whole.hexdigest()[:12]


def token_stream(texts: Iterable[str], tokenizer: Tokenizer, cache: Path | None = None) -> Stream:
    """The stream of `texts`, in order; empty texts are no documents.

    Without a cache the texts are taken one at a time; with one they are held, because its name is their hash.
    """
    if cache is None:
        return _encoded((text for text in texts if text), tokenizer)
    texts = [text for text in texts if text]
    key = _key(texts, tokenizer)
    files = cache / f"{key}.tokens.npy", cache / f"{key}.offsets.npy"
    if not all(file.exists() for file in files):
        stream = _encoded(texts, tokenizer)
        cache.mkdir(parents=True, exist_ok=True)
        for file, array in zip(files, (stream.tokens, stream.offsets), strict=True):
            _write(file, array)
    tokens, offsets = (np.load(file, mmap_mode="r", allow_pickle=False) for file in files)
    return Stream(tokens, np.asarray(offsets))


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Stream:
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.int32
    end = np.asarray([tokenizer.eos], dtype)
    parts = [part for text in texts for part in (tokenizer.encode(text).astype(dtype), end)]
    if not parts:
        raise UserError("data.path: every file is empty", why="no token to train on", fix="put text into the files")
    lengths = [len(body) + 1 for body in parts[::2]]
    return Stream(np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def _key(texts: Sequence[str], tokenizer: Tokenizer) -> str:
    whole = hashlib.sha256(f"{tokenizer.name} {tokenizer.vocab} {tokenizer.eos}\n".encode())
    for text in texts:
        whole.update(hashlib.sha256(text.encode()).digest())
    return whole.hexdigest()[:32]


def _write(file: Path, array: NDArray[Any]) -> None:
    """Whole or not at all: two runs may fill the cache at the same time."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            np.save(out, array, allow_pickle=False)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
