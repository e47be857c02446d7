"""Greedy text of every family, 64 tokens, against transformers' own `generate`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import families_reference as families
import jax
import numpy as np
import pytest

from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.program.build import make_mesh

pytestmark = pytest.mark.torch
TOKENS = 64
PROMPTS = [[5, 17, 3, 90, 11, 42, 8], [33], list(range(10, 40))]  # the last is longer than LongRope's first context


def reference_tokens(reference: Any, prompt: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    settings = reference.generation_config
    settings.eos_token_id, settings.pad_token_id = None, 0
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS)
    return out[0, len(prompt) :].tolist()


def our_tokens(pair: families.Pair, shape: MeshShape) -> list[list[int]]:
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    where = spec.map_specs(lambda s: stored(mesh, s.shape, s.axes), pair.model.specs())
    params = jax.device_put(jax.tree.map(np.asarray, pair.params), where)
    engine = Engine(pair.model, params, mesh, Compute(), frozenset(), pair.model.vocab)
    steps = list(Stream(engine, PROMPTS, Settings(TOKENS, Sampling(temperature=0))))
    return [[step[row] for step in steps] for row in range(len(PROMPTS))]


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> families.Pair:
    name = request.param
    variant = families.VARIANTS[name]
    if variant.kind != "GPT2":
        return families.pair(name)
    longer = families.Variant(variant.row, variant.kind, variant.changes, {**variant.dimensions, "n_positions": 128})
    monkeypatch.setitem(families.VARIANTS, f"{name}, 128 positions", longer)
    return families.pair(f"{name}, 128 positions")


# One of each family; all 26 with FORERUN_ALL_VARIANTS=1.
CHOSEN = families.VARIANTS if os.environ.get("FORERUN_ALL_VARIANTS") else families.FAMILY_EXAMPLES.values()


@pytest.mark.parametrize("pair", CHOSEN, indirect=True)
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
