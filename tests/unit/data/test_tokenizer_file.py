"""Limits of a tokenizer.json: what published ones have passes, what only an attacker writes does not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from error_assertions import raises_error
from tokenizers import decoders, models, normalizers, pre_tokenizers

from forerun.data import tokenizer
from forerun.data.tokenizer import load_tokenizer
from forerun.errors import UserError


def byte_level() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    return made


def saved(made: tokenizers.Tokenizer, folder: Path) -> Path:
    file = folder / "tokenizer.json"
    made.save(str(file))
    return file


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    file = saved(byte_level(), folder)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


def replace(pattern: str, content: str) -> normalizers.Replace:
    return normalizers.Replace(pattern, content)


PUBLISHED = {
    "llama 2": normalizers.Sequence([normalizers.Prepend("▁"), replace(" ", "▁")]),
    "gemma": replace(" ", "▁"),
    "clip": normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()]
    ),
    "albert": normalizers.Sequence(
        [
            replace("``", '"'),
            replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    ),
    "punctuation": normalizers.Sequence([replace(mark, ",") for mark in "،、，;:.!?"]),
}
HOSTILE = {
    "5 MB": replace("e", "e" * 5_000_000),
    "regex": normalizers.Replace(tokenizers.Regex(""), "e" * 300),
    "doubling": normalizers.Sequence([replace("e", "ee")] * 30),
    "nested": normalizers.Sequence([normalizers.Sequence([replace("e", "ee" * 10)] * 3), normalizers.Prepend("e" * 9)]),
    "prepend": normalizers.Prepend("e" * 5_000_000),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_normalizers_of_published_models_are_accepted(tmp_path: Path, name: str) -> None:
    made = byte_level()
    made.normalizer = PUBLISHED[name]
    assert load_tokenizer(str(saved(made, tmp_path))).vocab == 257


@pytest.mark.parametrize("name", HOSTILE)
def test_a_normalizer_that_multiplies_texts_is_rejected(tmp_path: Path, name: str) -> None:
    made = byte_level()
    made.normalizer = HOSTILE[name]
    with raises_error("E-DATA-083", "tokenizer.json"):
        load_tokenizer(str(saved(made, tmp_path)))


def test_a_decoder_that_multiplies_texts_is_rejected(tmp_path: Path) -> None:
    made = byte_level()
    made.decoder = decoders.Sequence([decoders.Replace("e", "e" * 5_000_000), decoders.Fuse()])
    with raises_error("E-DATA-083", "tokenizer.json"):
        load_tokenizer(str(saved(made, tmp_path)))


@pytest.mark.parametrize("growing", [*PUBLISHED.values(), HOSTILE["regex"]])
def test_no_text_grows_beyond_the_bound(growing: normalizers.Normalizer) -> None:
    text = "the e  `` '' ，;  \n eee"
    bound = tokenizer.growth(json.loads(growing.__getstate__()))
    assert len(growing.normalize_str(text).encode()) <= bound * len(text.encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["model"]["vocab"].update({"z" * 20_000: 257}),
        lambda content: content["model"]["vocab"].update({"zz": 2**31}),
    ],
    ids=["long token", "large id"],
)
def test_a_vocabulary_beyond_the_limits_is_rejected(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with raises_error("E-DATA-083", "tokenizer.json"):
        load_tokenizer(str(edited(tmp_path, change)))


def test_very_many_merges_are_rejected_before_they_are_parsed(tmp_path: Path) -> None:
    file = saved(byte_level(), tmp_path)
    merges = ",".join(['["h","e"]'] * (tokenizer.MAX_VALUES // 3 + 1))
    file.write_text(file.read_text().replace('"merges": []', f'"merges": [{merges}]'))
    assert file.stat().st_size < tokenizer.MAX_FILE_BYTES
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(file))
    assert str(tokenizer.MAX_VALUES) in caught.value.why


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with file.open("wb") as sparse:
        sparse.truncate(tokenizer.MAX_FILE_BYTES + 1)
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(file))
    assert str(file) in caught.value.what


def test_a_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert str(tmp_path / "tokenizer.json") in caught.value.what
