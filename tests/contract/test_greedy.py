"""Greedy text of every family, 64 tokens, against transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families_reference as families
import pytest
from family_parity import PROMPTS, TOKENS, our_tokens, reference_tokens

from forerun.hardware.mesh import MeshShape

pytestmark = pytest.mark.torch


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> families.Pair:
    name = request.param
    variant = families.VARIANTS[name]
    if variant.kind != "GPT2":
        return families.pair(name)
    longer = families.Variant(variant.row, variant.kind, variant.changes, {**variant.dimensions, "n_positions": 128})
    monkeypatch.setitem(families.VARIANTS, f"{name}, 128 positions", longer)
    return families.pair(f"{name}, 128 positions")


@pytest.mark.parametrize("pair", families.chosen_variants("greedy"), indirect=True)
def test_greedy_text_is_that_of_transformers(
    pair: families.Pair, request: pytest.FixtureRequest, families_table: Callable[[str, str, Any], None]
) -> None:
    expected = [reference_tokens(pair.reference, prompt) for prompt in PROMPTS]
    assert all(len(tokens) == TOKENS for tokens in expected)
    assert our_tokens(pair, MeshShape(1, 1, 1)) == expected
    families_table(families.VARIANTS[request.node.callspec.params["pair"]].row, "greedy", True)


@pytest.mark.parametrize("pair", ["phi3-longrope", "gpt2"], indirect=True)
def test_greedy_text_is_the_same_on_eight_devices(pair: families.Pair) -> None:
    assert our_tokens(pair, MeshShape(2, 2, 2)) == our_tokens(pair, MeshShape(1, 1, 1))
