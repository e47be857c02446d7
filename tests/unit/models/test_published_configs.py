"""config.json files as published, with the parameter counts that are published beside them."""

from __future__ import annotations

import pytest
from published_configs import GEMMA2_2B, GEMMA3_1B, GPT2

from forerun.models.families.registry import read_config
from forerun.models.keys import entries
from forerun.models.registry import model_for
from forerun.nn.spec import count


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(GEMMA2_2B, 2_614_341_888), (GEMMA3_1B, 999_885_952), (GPT2, 124_439_808)],
    ids=["gemma-2-2b", "gemma-3-1b", "gpt2"],
)
def test_parameters_as_published(config: dict[str, object], parameters: int) -> None:
    family, read = read_config(config, "config.json")
    model = model_for(read)
    assert count(model.specs()) == parameters
    names = [entry.name for entry in entries(family.table, model.specs(), model.stacks)]
    assert len(names) == len(set(names))


def test_gemma3_has_four_periods_and_a_tail() -> None:
    _, read = read_config(GEMMA3_1B, "config.json")
    assert [(stack.name, stack.numbers[0], stack.layers) for stack in model_for(read).stacks] == [
        ("blocks", 0, 24),
        ("tail", 24, 2),
    ]
