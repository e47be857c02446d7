from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from error_assertions import raises_error
from tokenizers import decoders, models, normalizers, pre_tokenizers

from forerun.data import tokenizer
from forerun.data.tokenizer import EOS_NAMES, load_tokenizer
from forerun.errors import UserError


def tokenizer_json(folder: Path, vocab: dict[str, int], added: dict[str, int]) -> Path:
    """A word-level tokenizer written by hand, so that the ids are known."""
    special = [
        {"id": i, "content": c, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for c, i in added.items()
    ]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None}
    whole |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    whole |= {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(whole))
    return path


def test_bytes_are_the_utf8_bytes_and_one_end() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab, tokenizer.eos) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.encode("").dtype == np.int32
    assert tokenizer.decode([97, 256, 0xC3, 0xA9, 0xFF]) == "aé\ufffd"


def test_bytes_round_trip_every_character() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "".join(chr(c) for c in range(0, 0x11000, 37) if not 0xD800 <= c < 0xE000) + "😀\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    broken = b"\xff\x80a".decode("utf-8", errors="surrogateescape")
    assert tokenizer.encode(broken).tolist() == [0xFF, 0x80, 97]


def test_a_file_gives_its_ids_and_a_name_with_its_hash(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, {"?": 0, "hello": 1, "world": 2, "</s>": 9}, {"</s>": 9})
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab, tokenizer.eos) == (10, 9)
    assert tokenizer.encode("world hello </s>").tolist() == [2, 1, 9]
    assert tokenizer.decode(np.array([2, 1, 9])) == "world hello"
    assert tokenizer.name == f"tokenizer.json:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def test_the_first_usual_name_ends_a_document(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, {"?": 0}, {"<|im_end|>": 1, "<|endoftext|>": 2})
    assert load_tokenizer(str(path)).eos == 2


def test_without_an_end_of_document_it_is_an_error(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, {"?": 0}, {})
    with raises_error("E-DATA-080") as error:
        load_tokenizer(str(path))
    assert all(name in error.value.why for name in EOS_NAMES)


def test_a_broken_and_a_missing_file_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"version": "1.0", "model"')
    (tmp_path / "empty").mkdir()
    for spec, text in (
        (broken, "E-DATA-081"),
        (tmp_path / "no.json", "E-DATA-077"),
        (tmp_path / "empty", "E-DATA-078"),
    ):
        with pytest.raises(UserError, match=text):
            load_tokenizer(str(spec))


def test_a_folder_is_its_tokenizer_and_the_end_that_its_config_names(tmp_path: Path) -> None:
    path = tokenizer_json(tmp_path, {"a": 0, "b": 1, "</s>": 2, "<end>": 3}, {"</s>": 2, "<end>": 3})
    assert load_tokenizer(str(tmp_path)).eos == load_tokenizer(str(path)).eos == 2
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert load_tokenizer(str(tmp_path)).eos == 3
    assert load_tokenizer(str(tmp_path)).path == str(path)


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
