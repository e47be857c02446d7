from __future__ import annotations

from typing import Any

import pytest
from error_assertions import raises_error

from forerun.config.schema import Model
from forerun.errors import UserError
from forerun.models.sizes import SIZES, decoder_config


def test_a_named_size_with_changes() -> None:
    config = decoder_config(Model(name="qwen3-0.6b", layers=3, tied=False, window=64))
    assert (config.layers, config.tied, config.window) == (3, False, 64)
    assert (config.embed, config.heads, config.kv_heads, config.head_dim, config.qk_norm) == (1024, 16, 8, 128, True)
    assert SIZES["qwen3-0.6b"].layers == 28


def test_free_dimensions_and_what_follows() -> None:
    config = decoder_config(Model(layers=2, embed=192, heads=6), tokenizer_vocab=257)
    assert (config.kv_heads, config.head_dim, config.vocab, config.tied) == (6, 32, 384, True)
    assert config.mlp == 512  # 8/3 of 192, a multiple of 64


@pytest.mark.parametrize(
    ("fields", "what", "fix"),
    [
        ({"name": "qwen3-0.6B"}, "'qwen3-0.6B' is neither", "pretrained weights: model=Qwen/Qwen3-0.6B; random"),
        ({"name": "gpt-5"}, "'gpt-5' is neither", "name a checkpoint"),
        ({"layers": 2, "heads": 2, "vocab": 8}, "lacks embed", "add model.embed"),
        ({"layers": 2, "embed": 10, "heads": 4, "vocab": 8}, "does not divide into 4 heads", "model.embed=12"),
        ({"layers": 2, "embed": 16, "heads": 4}, "vocabulary is not known", "model.vocab"),
        (
            {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 3, "vocab": 8},
            "4 heads cannot share 3 kv_heads",
            "a divisor of 4",
        ),
    ],
)
def test_mistakes(fields: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        decoder_config(Model(**fields))
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_named_size_is_held_to_the_same_rules() -> None:
    with raises_error("E-MODEL-018", "16", "3", "kv_heads"):
        decoder_config(Model(name="qwen3-0.6b", kv_heads=3))


def test_odd_heads_are_refused() -> None:
    with raises_error("E-MODEL-017", "7") as caught:
        decoder_config(Model(layers=2, embed=28, heads=4, vocab=64))
    assert caught.value.fix == "set model.head_dim=8"


@pytest.mark.parametrize(
    ("name", "ids", "vocab"),
    [
        ("qwen3-0.6b", None, 151_936),
        ("qwen3-0.6b", 151_669, 151_936),  # its own tokenizer: the published padding stays
        ("qwen2.5-7b", 151_665, 152_064),
        ("llama3.2-1b", 128_256, 128_256),
        ("qwen3-0.6b", 8192, 8192),
        ("qwen3-0.6b", 8193, 8320),
        ("smollm2-135m", 151_669, 151_680),
    ],
)
def test_the_vocabulary_of_a_named_size_follows_another_tokenizer(name: str, ids: int | None, vocab: int) -> None:
    assert decoder_config(Model(name=name), ids).vocab == vocab
    assert decoder_config(Model(name=name, vocab=1000), ids).vocab == 1000


@pytest.mark.parametrize(("key", "value"), [("head_dim", 16), ("rope_theta", 5e5), ("window", 64)])
def test_keys_that_differ_between_layers_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{key}.*E-MODEL-041"):
        decoder_config(Model(name="qwen3.5-0.8b", **{key: value}))


def test_other_dimensions_of_a_model_with_different_layers_can_be_changed() -> None:
    config = decoder_config(Model(name="qwen3.5-0.8b", layers=2, embed=32, heads=4, kv_heads=2, head_dim=256, mlp=48))
    assert (config.layers, config.embed, config.heads, config.mlp) == (2, 32, 4, 48)
