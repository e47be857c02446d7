"""Tokenizers: plain bytes, a tokenizer.json, a folder that has one, or a repository on the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.text import local_path
from forerun.errors import UserError, first_line
from forerun.files import read_regular
from forerun.hub.documents import read_json
from forerun.hub.names import is_repository
from forerun.hub.snapshot import Snapshot, tokenizer_snapshot
from forerun.units import MIB

if TYPE_CHECKING:
    import tokenizers


# ---- Safe reading of an untrusted tokenizer.json: limits on its size, its values and the growth of texts ----


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


FILE_NAME, CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>")


class ByteTokenizer:
    """A tokenizer whose ids 0..255 are the bytes of UTF-8 text. Id 256 ends a document, so the vocabulary is 257."""

    name = "bytes:257"
    path = "bytes"
    vocab = 257
    eos = 256
    specials: Mapping[str, int] = MappingProxyType({})  # the end of a document has no text

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), np.uint8).astype(np.int32)

    def encode_prompt(self, text: str) -> NDArray[np.int32]:
        return self.encode(text)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of `ids`. Document ends are omitted, and bytes that are not UTF-8 become U+FFFD."""
        array = np.asarray(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json. `encode` adds no special tokens, but recognises those that are written out in the text.

    `name` identifies the tokenizer and its content in records, `eos` is the id that ends a document, and `path` is the
    file that it was read from.
    """

    def __init__(self, name: str, inner: tokenizers.Tokenizer, eos: int, path: str = "") -> None:
        self.name, self.eos, self._inner, self.path = name, eos, inner, path
        self.vocab = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    @cached_property
    def specials(self) -> Mapping[str, int]:
        """Ids of the special tokens, by their text."""
        added = sorted(self._inner.get_added_tokens_decoder().items())
        return {token.content: number for number, token in added if token.special}

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_prompt(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a prompt, with the special tokens that the tokenizer adds at its start.

        Those that it adds at the end (such as T5's </s>) are removed, because they would end the answer.
        """
        found = self._inner.encode(text, add_special_tokens=True)
        ids, special = np.asarray(found.ids, np.int32), found.special_tokens_mask
        behind = next((n for n, mark in enumerate(reversed(special)) if not mark), 0)
        return ids[: len(ids) - behind]

    def content(self) -> dict[str, Any]:
        """Return the tokenizer as the JSON object of a tokenizer.json."""
        content: dict[str, Any] = json.loads(self._inner.to_str())
        return content

    def decode(self, ids: ArrayLike) -> str:
        return self._inner.decode(np.asarray(ids).ravel().tolist(), skip_special_tokens=True)


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    Args:
      spec: `bytes`, the path of a tokenizer.json, a folder that contains one, or `owner/name` on the hub, optionally
        with @revision. In a folder and on the hub, the `eos_token` of tokenizer_config.json ends a document.

    Raises:
      UserError: the path does not exist, or is not a tokenizer that forerun can use.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if hub_name(spec) is not None:
        files = tokenizer_files(spec)
        assert files is not None
        return checkpoint_tokenizer(files)
    path = tokenizer_path(spec)
    return _from_file(path, _configured_eos(path.parent) if path.parent == _local(spec) else None)


def hub_name(spec: str) -> tuple[str, str | None] | None:
    """Return the repository and the revision that `data.tokenizer` names; None if it names a path or bytes.

    Raises:
      UserError: nothing follows the @ of a hub name.
    """
    name, at, revision = spec.partition("@")
    if name.endswith(".json") or not is_repository(name) or Path(spec).exists():
        return None
    if at and not revision:
        raise UserError(
            "E-DATA-140",
            f"data.tokenizer: {spec} has no revision after the @",
            why="a hub name is owner/name, or owner/name@revision",
            fix=f"write {name} for the default branch, or name a branch, a tag or a commit",
        )
    return name, revision or None


def tokenizer_files(spec: str) -> Snapshot | None:
    """Return the folder or the repository that `data.tokenizer` names, downloaded if needed.

    None for `bytes` and for the path of a tokenizer.json, which have no eos_token and no chat template beside them.
    """
    if spec == "bytes":
        return None
    if (named := hub_name(spec)) is not None:
        return _fetched(*named)
    path = _local(spec)
    return Snapshot(spec, tokenizer_path(spec).parent, None) if path.is_dir() else None


@cache  # one process uses one commit, even if the branch moves
def _fetched(name: str, revision: str | None) -> Snapshot:
    return tokenizer_snapshot(name, revision)


def tokenizer_path(spec: str) -> Path:
    """Return the path of the tokenizer.json that `data.tokenizer` names, directly or by its folder."""
    path = _local(spec)
    if not path.is_dir():
        return path
    if not (path / FILE_NAME).is_file():
        raise UserError(
            "E-DATA-078",
            f"data.tokenizer: {spec} has no {FILE_NAME}",
            why="it is a folder, and forerun reads tokenizers only from a tokenizer.json",
            fix="save it once with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)",
        )
    return path / FILE_NAME


def _local(spec: str) -> Path:
    return local_path(spec, key="data.tokenizer", wanted="tokenizer.json, a folder that has one, or owner/name")


def _configured_eos(folder: Path) -> str | None:
    """Return the `eos_token` of the tokenizer_config.json in `folder`; None if there is none."""
    file = folder / CONFIG_NAME
    return special_text(read_json(file).get("eos_token")) if file.is_file() else None


def checkpoint_tokenizer(snapshot: Snapshot) -> Tokenizer:
    """Return the tokenizer of a checkpoint. The `eos_token` of its tokenizer_config.json ends a document."""
    path = snapshot.file("tokenizer.json")
    if path is None:
        raise UserError(
            "E-DATA-079",
            f"{snapshot.name} has no tokenizer.json",
            why="forerun reads tokenizers only from a tokenizer.json",
            fix="save it once with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(folder)) and name "
            "the file: data.tokenizer=folder/tokenizer.json",
        )
    return _from_file(path, special_text((snapshot.json("tokenizer_config.json") or {}).get("eos_token")))


def special_text(value: object) -> str | None:
    """Return the text of a special token, or None. Its value is a string, or an object with the key `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _from_file(path: Path, end: str | None = None) -> FileTokenizer:
    """Return the tokenizer of a file. The first of `end` and EOS_NAMES that it knows ends a document."""
    raw, inner = read_tokenizer(path)
    for name in (end, *EOS_NAMES) if end else EOS_NAMES:
        eos = inner.token_to_id(name)
        if eos is not None:
            inner.no_truncation()
            inner.no_padding()
            return FileTokenizer(f"{path.name}:{hashlib.sha256(raw).hexdigest()[:16]}", inner, eos, str(path))
    raise UserError(
        "E-DATA-080",
        f"data.tokenizer: {path} has no token that ends a document",
        why=f"none of {', '.join(EOS_NAMES)} is in its vocabulary",
        fix='add {"content": "<|endoftext|>", "special": true, ...} to its added_tokens',
    )
