"""config.json files as published, with the parameter counts that are published beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from published_configs import (
    DEVSTRAL2_ROPE,
    ERNIE_03B,
    EXAONE4_32B,
    GEMMA2_2B,
    GEMMA3_1B,
    GEMMA3_4B,
    GEMMA4_12B,
    GEMMA4_26B,
    GEMMA4_31B,
    GEMMA4_E2B,
    GEMMA4_E4B,
    GLM4_9B_CHAT,
    GPT2,
    GRANITE4_MICRO,
    MINISTRAL3_3B,
    MISTRAL_SMALL_3,
    OLMO3_7B,
    SEED_OSS_36B,
)

from forerun.models.decoder_config import DecoderConfig, QueryTemperature
from forerun.models.families.registry import read_config
from forerun.models.keys import entries, unused_names
from forerun.models.layer_kinds import LayerKind
from forerun.models.model_facts import model_for
from forerun.models.parameter_axes import active_matrix_count, matrix_count, parameter_count
from forerun.models.sizes import SIZES
from forerun.nn.rope import Rope, Yarn
from forerun.nn.spec import count


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        pytest.param(GEMMA2_2B, 2_614_341_888, id="gemma-2-2b"),
        pytest.param(GEMMA3_1B, 999_885_952, id="gemma-3-1b"),
        # The text part in transformers, and one scalar per layer, which transformers does not count.
        pytest.param(GEMMA4_E2B, 4_628_569_344 + 35, id="gemma-4-e2b"),
        pytest.param(GEMMA4_E4B, 7_463_013_376 + 42, id="gemma-4-e4b"),
        pytest.param(GEMMA4_12B, 11_907_350_272 + 48, id="gemma-4-12b"),
        pytest.param(GEMMA4_31B, 30_697_345_280 + 60, id="gemma-4-31b"),
        pytest.param(GEMMA4_26B, 25_233_141_760 + 30, id="gemma-4-26b-a4b"),
        pytest.param(GPT2, 124_439_808, id="gpt2"),
        pytest.param(GEMMA3_4B, 3_880_263_168, id="gemma-3-4b text"),
        pytest.param(MISTRAL_SMALL_3, 23_572_403_200, id="mistral-small-3 text"),
        pytest.param(OLMO3_7B, 7_298_011_136, id="olmo-3-7b"),
        pytest.param(EXAONE4_32B, 32_003_216_384, id="exaone-4-32b"),
        pytest.param(SEED_OSS_36B, 36_151_104_512, id="seed-oss-36b"),
        pytest.param(GLM4_9B_CHAT, 9_399_951_360, id="glm-4-9b"),
        pytest.param(ERNIE_03B, 360_748_032, id="ernie-0.3b"),
        pytest.param(MINISTRAL3_3B, 3_429_006_336, id="ministral-3-3b"),
        pytest.param(GRANITE4_MICRO, 3_402_836_480, id="granite-4.0-micro"),
    ],
)
def test_parameters_as_published(config: dict[str, object], parameters: int) -> None:
    family, read = read_config(config, "config.json")
    model = model_for(read)
    assert count(model.specs()) == parameters
    if isinstance(read, DecoderConfig):
        assert parameter_count(read) == parameters
    names = [entry.name for entry in entries(family.table, model.specs(), model.stacks)]
    assert len(names) == len(set(names))


def test_gemma3_has_four_periods_and_a_tail() -> None:
    _, read = read_config(GEMMA3_1B, "config.json")
    assert [(stack.name, stack.numbers[0], stack.layers) for stack in model_for(read).stacks] == [
        ("blocks", 0, 24),
        ("tail", 24, 2),
    ]


def decoder_of(content: dict[str, Any]) -> DecoderConfig:
    _, read = read_config(content, "config.json")
    assert isinstance(read, DecoderConfig)
    return read


def test_gemma4_26b_is_the_named_size() -> None:
    """25.2B parameters, of which a token uses 3.8B (https://huggingface.co/google/gemma-4-26B-A4B)."""
    size = SIZES["gemma-4-26b-a4b"]
    assert decoder_of(GEMMA4_26B) == size
    assert parameter_count(size) - matrix_count(size) + active_matrix_count(size) == pytest.approx(3.8e9, rel=0.01)


def test_olmo3_scales_rope_only_in_layers_without_a_window() -> None:
    near, *_, far = decoder_of(OLMO3_7B).layer_kinds
    assert near == LayerKind(4096, Rope(500_000.0, 128))
    assert far.window is None
    assert far.rope is not None
    assert isinstance(far.rope.scaling, Yarn)
    assert far.rope.scaling.attention == pytest.approx(0.1 * math.log(8) + 1)


def test_exaone4_rotates_only_in_layers_with_a_window() -> None:
    kinds = decoder_of(EXAONE4_32B).layer_kinds
    assert [(kind.window, kind.rope is not None) for kind in kinds] == [(4096, True)] * 3 + [(None, False)]


@pytest.mark.parametrize(
    ("content", "attention", "temperature"),
    [
        (MINISTRAL3_3B, 1.0, QueryTemperature(0.1, 16384)),
        (MINISTRAL3_3B | {"rope_parameters": DEVSTRAL2_ROPE}, 0.1 * math.log(64) + 1, None),
        (
            {key: MINISTRAL3_3B[key] for key in MINISTRAL3_3B if key != "rope_parameters"},
            1.0,
            QueryTemperature(0.1, 16384),
        ),
    ],
    ids=["ministral-3", "devstral-2", "defaults"],
)
def test_yarn_and_temperature_of_ministral3(
    content: dict[str, Any], attention: float, temperature: QueryTemperature | None
) -> None:
    config = decoder_of(content)
    assert isinstance(config.rope_scaling, Yarn)
    assert config.rope_scaling.attention == pytest.approx(attention)
    assert config.query_temperature == temperature


def test_granite4_has_the_factors_of_its_file() -> None:
    config = decoder_of(GRANITE4_MICRO)
    factors = (config.embed_scale, config.query_scale, config.residual_scale, config.logit_divisor)
    assert factors == (12.0, 0.015625, 0.22, 10.0)


def test_the_last_layers_of_gemma4_share_keys() -> None:
    _, read = read_config(GEMMA4_E2B, "config.json")
    assert isinstance(read, DecoderConfig)
    model: Any = model_for(read)
    assert [(stack.name, stack.numbers[0], stack.layers) for stack in model.stacks] == [
        ("blocks.sliding", 0, 12),
        ("blocks.full", 4, 3),
        ("last.sliding", 15, 16),
        ("last.full", 19, 4),
    ]
    specs = model.specs()
    assert specs.last["full"].key is None
    assert specs.last["full"].gate.value.shape == (4, 1536, 12_288)
    cache = model.cache(1, 8, "bfloat16")
    assert {name: part.keys.shape for name, part in cache.parts.items()} == {
        "sliding": (12, 1, 1, 8, 256),
        "full": (3, 1, 1, 8, 512),
    }


@pytest.mark.parametrize(("config", "sharing"), [(GEMMA4_E2B, range(15, 35)), (GEMMA4_31B, ())], ids=["e2b", "31b"])
def test_published_keys_of_layers_that_share_them_are_unused(config: dict[str, object], sharing: range) -> None:
    family, read = read_config(config, "config.json")
    model = model_for(read)
    names = [f"model.layers.{n}.self_attn.{part}.weight" for n in sharing for part in ("k_proj", "v_proj", "k_norm")]
    biases = [f"model.layers.{n}.self_attn.{part}.bias" for n in sharing for part in ("k_proj", "v_proj")]
    assert unused_names(family.table, model.specs(), model.stacks) == {*names, *biases}
