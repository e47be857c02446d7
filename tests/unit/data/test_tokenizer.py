from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from error_assertions import raises_error

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
