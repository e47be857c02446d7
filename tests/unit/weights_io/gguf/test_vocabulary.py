"""Vocabularies of GGUF files: names that llama.cpp gives to pre-tokenizers, token types, scores and special ids."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from error_assertions import assert_error
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from forerun.errors import UserError
from forerun.weights_io.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    model_name,
    vocabulary_of,
)

TEXT = ["the quick brown fox jumps over the lazy dog, and then the user says hello world\n\n"] * 3
# The expressions in the tokenizer.json files of Llama 3, Qwen2.5 and Mistral Nemo, as published.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*before: Any, use_regex: bool = False, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>", "<|turn|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


def sentence_piece(prefix: bool) -> tokenizers.Tokenizer:
    """As Llama 2 with a prefix, and as Gemma without one."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *all_bytes], show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def folder_of(made: tokenizers.Tokenizer, folder: Path, **names: Any) -> Path:
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text("{}")
    return folder


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: byte_level(use_regex=True), "gpt-2"),
        (lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True), "smollm"),
        (lambda: byte_level(split(LLAMA3), ignore_merges=True), "llama-bpe"),
        (lambda: byte_level(split(LLAMA3)), "dbrx"),
        (lambda: byte_level(split(QWEN2)), "qwen2"),
        (lambda: byte_level(split(TEKKEN), ignore_merges=True), "tekken"),
    ],
    ids=["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken"],
)
def test_steps_select_the_name(made: Any, name: str, tmp_path: Path) -> None:
    found = vocabulary_of(folder_of(made(), tmp_path), 320, [])
    assert (found.model, found.pre, found.scores) == ("gpt2", name, None)


@pytest.mark.parametrize(
    "made",
    [
        lambda: byte_level(pre_tokenizers.Whitespace()),
        lambda: byte_level(split(QWEN2), ignore_merges=True),
        lambda: byte_level(),
        lambda: tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        lambda: _lower(byte_level(use_regex=True)),
    ],
    ids=["whitespace", "merges", "no split", "words", "lower case"],
)
def test_other_tokenizers_are_rejected(made: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        vocabulary_of(folder_of(made(), tmp_path), 320, [])
    assert_error(raised.value, "E-WEIGHTS-022")


def _lower(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.normalizer = normalizers.Lowercase()
    return made


def test_tokens_types_and_special_ids(tmp_path: Path) -> None:
    made = byte_level(use_regex=True)
    found = vocabulary_of(folder_of(made, tmp_path, eos_token="<|end|>"), 320, [1, 0])
    assert [made.id_to_token(n) for n in range(301)] == found.tokens[:301]
    assert found.tokens[301:] == [f"[PAD{n}]" for n in range(301, 320)]
    assert found.types == [CONTROL, CONTROL] + [NORMAL] * 298 + [USER_DEFINED] + [UNUSED] * 19
    assert found.special == {"eos": 0, "eot": 1}
    assert (found.add_bos, found.space_prefix) == (False, None)
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert found.merges == [" ".join(pair) for pair in merges]


def test_a_model_of_bytes_has_one_merge_that_never_applies(tmp_path: Path) -> None:
    from forerun.weights_io.documents import byte_tokenizer

    found = vocabulary_of(folder_of(byte_tokenizer(), tmp_path, eos_token="<|endoftext|>"), 384, [256])
    assert (found.model, found.pre, found.special) == ("gpt2", "gpt-2", {"eos": 256})
    assert found.merges is not None
    assert len(found.merges) == 1
    assert all(len(part) > 1 for part in found.merges[0].split(" ")), "single characters could be merged"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece(prefix: bool, tmp_path: Path) -> None:
    """Llama.cpp merges the pair with the highest score; a plain loop over the scores must give the same tokens."""
    made = sentence_piece(prefix)
    found = vocabulary_of(folder_of(made, tmp_path, bos_token="<s>", eos_token="</s>"), 400, [2])
    assert (found.model, found.pre, found.space_prefix, found.merges) == ("llama", "default", prefix, None)
    assert found.types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] or found.types[:3] == [UNKNOWN, CONTROL, CONTROL]
    assert found.special == {"bos": 1, "eos": 2}
    assert found.scores is not None
    text = "hello the quick dog jumps and says"
    pieces = list(("▁" if prefix else "") + text.replace(" ", "▁"))
    ids, scores = {token: n for n, token in enumerate(found.tokens)}, found.scores
    while True:
        pairs = [(scores[ids[a + b]], -n) for n, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        n = -max(pairs)[1]
        pieces[n : n + 2] = [pieces[n] + pieces[n + 1]]
    assert [ids[piece] for piece in pieces] == made.encode(text, add_special_tokens=False).ids


def test_the_name_decides_about_spaces_after_special_tokens(tmp_path: Path) -> None:
    """llama.cpp removes them for names with phi3 or phi-3, as the tokenizer of Phi-3 does."""
    plain = vocabulary_of(folder_of(sentence_piece(True), tmp_path), 500, [])
    assert not plain.strips_spaces
    assert [model_name(name, plain) for name in ("run", "my-phi3", "Phi-3-run")] == ["run", "my-phi 3", "Phi 3-run"]
    made = sentence_piece(True)
    made.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<|end|>", rstrip=True)])
    path = folder_of(made, tmp_path) / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    path.write_text(json.dumps(content))
    phi3 = vocabulary_of(tmp_path, 500, [])
    assert phi3.strips_spaces
    assert [model_name(name, phi3) for name in ("run", "my-phi3")] == ["run (phi-3 tokenizer)", "my-phi3"]
