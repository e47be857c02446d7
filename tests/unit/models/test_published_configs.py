"""config.json files as published, with the parameter counts that are published beside them."""

from __future__ import annotations

from typing import Any

import pytest
from published_configs import GEMMA2_2B, GEMMA3_1B, GEMMA4_12B, GEMMA4_31B, GEMMA4_E2B, GEMMA4_E4B, GPT2

from forerun.models.families.registry import read_config
from forerun.models.keys import entries, unused_names
from forerun.models.parameter_axes import parameter_count
from forerun.models.registry import model_for
from forerun.models.sizes import DecoderConfig
from forerun.nn.spec import count


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GEMMA2_2B, 2_614_341_888),
        (GEMMA3_1B, 999_885_952),
        (GPT2, 124_439_808),
        # The text part in transformers, and one scalar per layer, which transformers does not count.
        (GEMMA4_E2B, 4_628_569_344 + 35),
        (GEMMA4_E4B, 7_463_013_376 + 42),
        (GEMMA4_12B, 11_907_350_272 + 48),
        (GEMMA4_31B, 30_697_345_280 + 60),
    ],
    ids=["gemma-2-2b", "gemma-3-1b", "gpt2", "gemma-4-e2b", "gemma-4-e4b", "gemma-4-12b", "gemma-4-31b"],
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
