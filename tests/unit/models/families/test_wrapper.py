"""The config.json and the tensor names of multimodal checkpoints, without their weights."""

from __future__ import annotations

from typing import Any

import pytest
from error_assertions import assert_error

from forerun.errors import UserError
from forerun.models.families import llama
from forerun.models.families.registry import read_config
from forerun.models.families.wrapper import INNER, LAYOUTS, OUTER, WRAPPERS, Layout
from forerun.models.quantization_config import rounding_in
from forerun.weights_io.packed import config_section

TEXT: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 64,
}
CONFIG: dict[str, Any] = {"model_type": "mistral3", "text_config": TEXT, "vision_config": {"hidden_size": 8}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=["inner", "outer"])
def test_names_decide_the_prefix(layout: Layout) -> None:
    """Both layouts exist for one model_type. PEFT's names are those of the modules, whatever the files have."""
    names = {layout.body + "embed_tokens.weight", layout.head + "weight", "vision_tower.patch_conv.weight"}
    family, _ = read_config(CONFIG, "config.json", names)
    assert family.table[0].name == layout.body + "embed_tokens.weight"
    assert family.table == layout.table(llama.MISTRAL_TABLE)
    assert family.modules == INNER.table(llama.MISTRAL_TABLE)
    assert [layout.plain(one.name) for one in family.table] == [one.name for one in llama.MISTRAL_TABLE]


def test_the_prefix_of_a_text_model() -> None:
    """transformers saves the text part of some multimodal models with the prefix, and loads it without."""
    names = {"model.language_model.embed_tokens.weight"}
    family, _ = read_config(TEXT, "config.json", names)
    assert (family.table, family.modules) == (INNER.table(llama.MISTRAL_TABLE), llama.MISTRAL_TABLE)
    assert read_config(TEXT, "config.json", {"model.embed_tokens.weight"})[0].table == llama.MISTRAL_TABLE


@pytest.mark.parametrize(
    ("outer", "inner", "head", "tied"),
    [
        (None, None, True, False),  # the published Mistral Small: the head is stored
        (True, False, True, False),  # the same, saved by transformers 5
        (True, True, True, True),  # a stored copy of the embedding
        (None, None, False, True),  # transformers ties by default
        (True, False, False, True),
        (False, True, True, False),  # transformers reads the outer value
        (None, True, None, True),  # the names are not known
        (None, None, None, False),
    ],
)
def test_whether_the_head_is_tied(outer: bool | None, inner: bool | None, head: bool | None, tied: bool) -> None:
    ties = [{} if value is None else {"tie_word_embeddings": value} for value in (outer, inner)]
    names = {"language_model.model.norm.weight", *(["language_model.lm_head.weight"] if head else [])}
    config = CONFIG | ties[0] | {"text_config": TEXT | ties[1]}
    assert read_config(config, "config.json", None if head is None else names)[1].tied is tied


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"text_config": None}, "E-MODEL-040", "text_config"),
        ({"new_feature": 3}, "E-MODEL-006", "new_feature"),
        ({"text_config": TEXT | {"new_feature": 3}}, "E-MODEL-006", "text_config"),
        ({"text_config": TEXT | {"model_type": "mamba"}}, "E-MODEL-001", "'mamba'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "E-MODEL-006", "gptq"),
    ],
)
def test_unknown_keys_are_rejected(change: dict[str, Any], code: str, value: str) -> None:
    with pytest.raises(UserError) as raised:
        read_config(CONFIG | change, "config.json")
    assert_error(raised.value, code, what=value)


@pytest.mark.parametrize(
    ("kind", "name", "is_other"),
    [
        ("gemma3", "vision_tower.vision_model.head.probe", True),
        ("gemma3", "model.multi_modal_projector.mm_input_projection_weight", True),
        ("gemma3", "language_model.model.norm.weight", False),
        ("qwen3_5", "model.visual.blocks.0.attn.qkv.weight", True),
        ("qwen3_5", "mtp.layers.0.mlp.up_proj.weight", True),
        ("qwen3_5", "model.language_model.norm.weight", False),
        ("qwen3_5", "lm_head.weight", False),
        ("gemma4", "model.embed_audio.embedding_projection.weight", True),
        ("gemma4_unified", "model.vision_embedder.patch_dense.weight", True),
        ("gemma4", "model.language_model.embed_tokens_per_layer.weight", False),
    ],
)
def test_which_tensors_are_copied(kind: str, name: str, is_other: bool) -> None:
    assert WRAPPERS[kind].is_other(name) is is_other


def test_the_unrounded_modules_of_a_wrapper() -> None:
    """The section is read again: a pattern of another program could exclude modules of the text model."""
    family, _ = read_config(CONFIG, "config.json", {OUTER.body + "norm.weight"})
    found = family.ignored(["language_model.model.layers.0.mlp.up_proj", "lm_head"])
    assert found == [
        "language_model.model.layers.0.mlp.up_proj",
        "lm_head",
        "model.language_model.layers.0.mlp.up_proj",
        "re:.*vision_tower.*",
        "re:.*multi_modal_projector.*",
    ]
    layout = rounding_in(config_section(_rounding(), found))
    assert layout is not None
    assert not layout.keeps("model.language_model.layers.{}.mlp.up_proj")
    assert rounding_in(config_section(_rounding(), ["re:.*q_proj"])) is None


def _rounding() -> Any:
    from forerun.models.quantization_config import Rounding

    return Rounding(4, 32, activations=False)
