"""Real weights in forerun: they load, say what torch says, and go out again as they came in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hub.chat.template import render
from forerun.hub.snapshot import snapshot
from forerun.models.families.registry import read_config
from forerun.models.model_facts import model_for
from forerun.trained_model.load_model import LoadedModel, abstract_plain_params, load_model
from forerun.weights_io.read import read_params
from forerun.weights_io.write import write_params

pytestmark = pytest.mark.torch

STORY = "Once upon a time"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def greedy(loaded: LoadedModel, ids: list[int], count: int) -> list[int]:
    engine = Engine(
        loaded.model, loaded.params, loaded.mesh, loaded.compute, eos=loaded.eos, vocab=loaded.tokenizer.vocab
    )
    settings = Settings(max_tokens=count, sampling=Sampling(temperature=0.0))
    return [token for [token] in Stream(engine, [ids], settings) if token is not None]


def torch_greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return list(answer[0, len(ids) :].tolist())


def test_stories_are_told_as_torch_tells_them(stories_folder: Path) -> None:
    loaded = load_model(str(stories_folder), device="cpu", devices=1, dtype="float32")
    ids = [1, *loaded.tokenizer.encode(STORY).tolist()]
    expected = torch_greedy(stories_folder, ids, 48)
    assert greedy(loaded, ids, 48) == expected
    assert "little girl" in loaded.tokenizer.decode(expected)


def test_smollm2_answers_as_torch_answers(smollm2_folder: Path) -> None:
    loaded = load_model(str(smollm2_folder), device="cpu", devices=1, dtype="float32")
    assert loaded.chat_template is not None
    ids = loaded.tokenizer.encode(render(loaded.chat_template, QUESTION, special=loaded.special)).tolist()
    expected = torch_greedy(smollm2_folder, ids, 24)
    got = greedy(loaded, ids, 24)
    ends = [n for n, token in enumerate(expected) if token in loaded.eos]
    assert got == (expected[: ends[0]] if ends else expected)
    assert "Paris" in loaded.tokenizer.decode(got)


@pytest.mark.parametrize("name", ["stories_folder", "smollm2_folder"])
def test_out_as_it_came_in(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    found = snapshot(str(folder))
    family, config = read_config(found.config(), name)
    model = model_for(config)
    loaded = load_model(str(folder), device="cpu", devices=1, dtype="float32")
    with found.open_weights() as weights:
        params = read_params(weights, family.table, model, abstract_plain_params(model, loaded.mesh, "float32"))
    write_params(tmp_path, params, family.table, model, "F32")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(before) == set(after)
    for tensor in before:
        assert np.array_equal(before[tensor], after[tensor]), tensor
