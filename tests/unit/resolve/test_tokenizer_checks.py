"""Two tokenizers that differ are told apart, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from error_assertions import assert_error
from tokenizers import models, normalizers, pre_tokenizers

from forerun.config.load import load
from forerun.data.tokenizer import ByteTokenizer, load_tokenizer
from forerun.errors import UserError
from forerun.resolve.resolve_model import resolve_model
from forerun.resolve.tokenizer_checks import token_differences
from forerun.weights_io.documents import byte_tokenizer

VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3}
CONFIG = """{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32,
"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
"hidden_act": "silu", "attention_bias": false}"""


def made(folder: Path, name: str, **changes: Any) -> Any:
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=changes.get("vocab", VOCAB), merges=changes.get("merges", [("a", "b")]))
    )
    inner.pre_tokenizer = changes.get("pre_tokenizer", pre_tokenizers.ByteLevel())
    if "normalizer" in changes:
        inner.normalizer = changes["normalizer"]
    inner.add_special_tokens(["</s>", *changes.get("special", [])])
    inner.save(str(folder / f"{name}.json"))
    return load_tokenizer(str(folder / f"{name}.json"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"special": ["<|tool|>"]}, ["token 5 is nothing to the student, '<|tool|>' to the teacher"]),
        (
            {"vocab": {"a": 0, "c": 1, "b": 2, "ab": 3}},
            ["token 1 is 'b' to the student, 'c' to the teacher", "token 2 is 'c' to the student, 'b' to the teacher"],
        ),
        ({"merges": []}, ["model.merges of their tokenizer.json differs"]),
        ({"normalizer": normalizers.Lowercase()}, ["normalizer of their tokenizer.json differs"]),
        ({"pre_tokenizer": pre_tokenizers.Whitespace()}, ["pre_tokenizer of their tokenizer.json differs"]),
    ],
    ids=["equal", "special", "vocab", "merges", "normalizer", "pre_tokenizer"],
)
def test_what_differs_is_named(tmp_path: Path, changes: dict[str, Any], named: list[str]) -> None:
    assert [*token_differences(made(tmp_path, "student"), made(tmp_path, "teacher", **changes))] == named


def test_bytes_and_a_file_of_bytes_are_one(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "bytes.json"))
    assert not [*token_differences(ByteTokenizer(), load_tokenizer(str(tmp_path / "bytes.json")))]


def test_a_plan_and_a_run_refuse_the_teacher(tmp_path: Path) -> None:
    for name, special in (("student", []), ("teacher", ["<|tool|>"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(CONFIG)
        made(tmp_path / name, "tokenizer", special=special)
    (tmp_path / "job.yaml").write_text("model: ./student\ndata: text.txt\nsteps: 2\ndistil: ./teacher\n")
    with pytest.raises(UserError) as caught:
        resolve_model(load(tmp_path / "job.yaml").job)
    assert_error(caught.value, "E-RUN-042", what=str(tmp_path / "teacher"), why="token 5 ")
    assert "'<|tool|>'" in caught.value.why
    resolve_model(load(tmp_path / "job.yaml", ["distil.cache=words"]).job)  # compared when the cache was made
